"""From the records of runs to figures. Reads records only; what the figures mean in words is in
`offbeat_lab.findings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.run.records import Evaluation, Summary
from offbeat_lab.breakdown import Steps, lateness, read_steps
from offbeat_lab.comparison import Comparison, Difference, Measure
from offbeat_lab.factor_work import FactorWork, factor_work
from offbeat_lab.findings import findings, verdict
from offbeat_lab.records import Record, read_profiles
from offbeat_lab.statistics import Estimate, compare, estimate

_PHASES: Final[Mapping[Measure, str]] = {
    "share_compute": "compute",
    "share_encode": "encode",
    "share_wait": "wait",
    "share_transfer": "transfer",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnalysedRun:
    """One finished run."""

    summary: Summary
    steps: Steps
    evaluations: Sequence[Evaluation]
    work: FactorWork | None = None

    @property
    def block_s(self) -> Sequence[float]:
        """Seconds a step, in blocks of steps; a step takes as long as the mean of the ranks that
        did it.
        """
        return self.steps.block_step_s()

    @property
    def block_samples_per_s(self) -> Sequence[float]:
        """Samples a second of all workers together, in the same blocks."""
        return self.steps.block_samples_per_s()


def analyse(directory: Path, comparison: Comparison, alone: Mapping[int, Path]) -> Comparison:
    """`comparison` with measures, differences, verdict and findings.

    Args:
        directory: the comparison's.
        comparison: with contestants that have run, and failures noted.
        alone: by seed, the run in which the workers exchanged nothing; where it is missing there is
            no efficiency.
    """
    runs = {
        contestant.label: [_read(directory / path) for path in contestant.runs]
        for contestant in comparison.contestants
        if contestant.failure is None
    }
    target = (
        comparison.target
        if comparison.target is not None
        else common_level(runs, comparison.higher_is_better)
    )
    ceiling = {
        seed: _samples_per_s(run)
        for seed, path in alone.items()
        if (run := _read(path)) is not None
    }
    contestants = [
        contestant.model_copy(
            update={
                "measures": _measures(runs[contestant.label], comparison, target, ceiling),
                **_lateness(runs[contestant.label]),
                "notices": _notices(runs[contestant.label]),
            }
        )
        if contestant.label in runs
        else contestant
        for contestant in comparison.contestants
    ]
    # A script may have come to its end before it was to be stopped.
    done = [run.summary.steps for of in runs.values() for run in of if run is not None]
    analysed = comparison.model_copy(
        update={
            "contestants": contestants,
            "target": target,
            "steps": min(comparison.steps, max(done, default=comparison.steps)),
        }
    )
    samples = {
        label: [s for run in of if run is not None for s in run.block_s]
        for label, of in runs.items()
    }
    analysed = analysed.model_copy(update={"differences": _differences(analysed, samples)})
    return analysed.model_copy(
        update={"verdict": verdict(analysed), "findings": findings(analysed)}
    )


def _read(path: Path) -> AnalysedRun | None:
    record = Record(path)
    summary = record.summary()
    if summary is None or summary.status != "finished":
        return None
    steps = read_steps(record)
    if not steps.num_steps:
        return None
    evaluations = [
        evaluation for evaluation in record.evaluations() if math.isfinite(evaluation.metric)
    ]  # diverged
    return AnalysedRun(
        summary=summary,
        steps=steps,
        evaluations=evaluations,
        work=factor_work(read_profiles(record)),
    )


def common_level(
    runs: Mapping[str, Sequence[AnalysedRun | None]], higher_is_better: bool
) -> float | None:
    """The best metric that every run has reached at some time."""
    best = max if higher_is_better else min
    reached = [
        best(evaluation.metric for evaluation in run.evaluations)
        for of in runs.values()
        for run in of
        if run is not None and run.evaluations
    ]
    return (min if higher_is_better else max)(reached) if reached else None


def _measures(
    runs: Sequence[AnalysedRun | None],
    comparison: Comparison,
    target: float | None,
    ceiling: Mapping[int, float],
) -> dict[Measure, Estimate]:
    reached = [reach(run, target, comparison.higher_is_better) for run in runs]
    block_s = [s for run in runs if run is not None for s in run.block_s]
    step_s = [None if run is None else float(np.median(run.block_s)) for run in runs]
    block_rates = [rate for run in runs if run is not None for rate in run.block_samples_per_s]
    rates = [None if run is None else _samples_per_s(run) for run in runs]
    best = float(np.median(list(ceiling.values()))) if ceiling else None
    measures: dict[Measure, Estimate] = {
        "time_to_target_s": estimate([None if r is None else r[0] for r in reached]),
        "steps_to_target": estimate([None if r is None else r[1] for r in reached]),
        "final_metric": estimate([None if run is None else run.summary.metric for run in runs]),
        "step_s": estimate(step_s, block_s),
        "steps_per_s": estimate([s and 1 / s for s in step_s], [1 / s for s in block_s]),
        "samples_per_s": estimate(rates, block_rates),
        "bytes_per_step": estimate(
            [None if run is None else run.summary.bytes_sent_per_step for run in runs]
        ),
        "messages_per_step": estimate(
            [None if run is None else run.summary.messages_sent_per_step for run in runs]
        ),
        "peak_memory_bytes": estimate(
            [None if run is None else float(max(run.summary.peak_memory_bytes)) for run in runs]
        ),
    }
    if best:
        measures["efficiency"] = estimate(
            [
                rate and rate / ceiling.get(seed, best)
                for seed, rate in zip(comparison.seeds, rates, strict=True)
            ],
            [rate / best for rate in block_rates],
        )
    works = [None if run is None else run.work for run in runs]
    if any(works):
        measures["factors_exposed_s"] = estimate(
            [work.sums.exposed_s if work and work.sums else None for work in works]
        )
        measures["inversion_s"] = estimate(
            [work.longest_inversion_s if work else None for work in works]
        )
    shares = [None if run is None else run.steps.settled().shares() for run in runs]
    for name, phase in _PHASES.items():
        measures[name] = estimate([None if share is None else share[phase] for share in shares])
    return measures


def _samples_per_s(run: AnalysedRun) -> float:
    return float(np.median(run.block_samples_per_s))


def reach(
    run: AnalysedRun | None, target: float | None, higher_is_better: bool
) -> tuple[float, float] | None:
    """(seconds, steps) when the metric reached the target, read off a straight line between
    measurements.
    """
    if run is None or target is None:
        return None
    sign = 1 if higher_is_better else -1
    before: Evaluation | None = None
    for evaluation in run.evaluations:
        gained = sign * (evaluation.metric - target)
        if gained >= 0:
            if before is None:
                return evaluation.seconds, float(evaluation.step)
            missing = sign * (target - before.metric)
            part = missing / (missing + gained) if missing + gained else 1.0
            return (
                before.seconds + part * (evaluation.seconds - before.seconds),
                before.step + part * (evaluation.step - before.step),
            )
        before = evaluation
    return None


def _lateness(runs: Sequence[AnalysedRun | None]) -> dict[str, object]:
    late = lateness([run.steps for run in runs if run is not None])
    if late is None:
        return {"lateness_s": [], "slow_worker": None}
    return {"lateness_s": late.mean_s.tolist(), "slow_worker": late.slow_worker}


def _notices(runs: Sequence[AnalysedRun | None]) -> list[str]:
    notices = list(
        dict.fromkeys(notice for run in runs if run is not None for notice in run.summary.notices)
    )
    ages = [
        run.summary.mean_entry_age
        for run in runs
        if run is not None and run.summary.mean_entry_age is not None
    ]
    if ages:
        mean = sum(ages) / len(ages)
        notices.append(
            f"from one sending of an entry to the next {mean:.3g} steps passed, a mean over what"
            " was not sent densely"
        )
    skipped = sum(run.summary.skipped_steps for run in runs if run is not None)
    return notices + (
        [f"{skipped} steps were skipped, since some gradient was not finite"] if skipped else []
    )


def _differences(
    comparison: Comparison, samples: Mapping[str, Sequence[float]]
) -> list[Difference]:
    """Every pair of contestants, by the time to the target and by the time of a step."""
    able = [contestant for contestant in comparison.contestants if contestant.label in samples]
    found = []
    for place, a in enumerate(able):
        for b in able[place + 1 :]:
            for measure in ("time_to_target_s", "step_s"):
                first, second = a.measures[measure], b.measures[measure]
                if not first.median or not second.median:
                    continue
                fine = (samples[a.label], samples[b.label]) if measure == "step_s" else (None, None)
                ratio = compare(first, second, *fine)
                found.append(
                    Difference(measure=measure, a=a.label, b=b.label, **ratio.model_dump())
                )
    return found
