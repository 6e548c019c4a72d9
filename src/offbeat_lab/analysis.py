"""From the records of runs to figures, and what these mean in words. Reads records only. A
difference smaller than the spread is said to be none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.run.recording import TRAINING_LOSS
from offbeat.run.records import Evaluation, Summary
from offbeat_lab.breakdown import Steps, lateness, read_steps, slow_worker_of
from offbeat_lab.comparison import ComparedStrategy, Comparison, Difference, Measure
from offbeat_lab.figures import MEASURES, NUMBER, RATIO, SECONDS, SHARE, write
from offbeat_lab.records import Record
from offbeat_lab.statistics import LEAST_SEEDS, Estimate, compare, estimate

_PHASES: Final[Mapping[Measure, str]] = {
    "share_compute": "compute",
    "share_encode": "encode",
    "share_wait": "wait",
    "share_transfer": "transfer",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnalysedRun:
    """One finished run. It has `diverged` where its metric is no number at its end."""

    summary: Summary
    steps: Steps
    evaluations: Sequence[Evaluation]
    diverged: bool = False


def analyse(directory: Path, comparison: Comparison, alone: Mapping[int, Path]) -> Comparison:
    """`comparison` with measures, differences, verdict and findings.

    Args:
        directory: the comparison's.
        comparison: with strategies that have run, and failures noted.
        alone: by seed, the run in which the workers exchanged nothing; where it is missing there is
            no efficiency.
    """
    runs = {
        strategy.label: [_read(directory / path) for path in strategy.runs]
        for strategy in comparison.strategies
        if strategy.failure is None
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
    strategies = [
        strategy.model_copy(
            update={
                "measures": _measures(runs[strategy.label], comparison, target, ceiling),
                **_lateness(runs[strategy.label]),
                "notices": _notices(runs[strategy.label], comparison.seeds),
            }
        )
        if strategy.label in runs
        else strategy
        for strategy in comparison.strategies
    ]
    # A script may have come to its end before it was to be stopped.
    done = [run.summary.steps for of in runs.values() for run in of if run is not None]
    analysed = comparison.model_copy(
        update={
            "strategies": strategies,
            "target": target,
            "steps": min(comparison.steps, max(done, default=comparison.steps)),
        }
    )
    samples = {
        label: [s for run in of if run is not None for s in run.steps.block_step_s()]
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
    found = record.evaluations()
    evaluations = [each for each in found if math.isfinite(each.metric)]
    # Of training losses a record keeps only those that are numbers.
    diverged = bool(found) and (
        not math.isfinite(found[-1].metric)
        or (summary.metric_name == TRAINING_LOSS and summary.metric is None)
    )
    return AnalysedRun(summary=summary, steps=steps, evaluations=evaluations, diverged=diverged)


def common_level(
    runs: Mapping[str, Sequence[AnalysedRun | None]], higher_is_better: bool
) -> float | None:
    """The best metric that every run has reached at some time, but for those that diverged."""
    best = max if higher_is_better else min
    reached = [
        best(evaluation.metric for evaluation in run.evaluations)
        for of in runs.values()
        for run in of
        if run is not None and run.evaluations and not run.diverged
    ]
    return (min if higher_is_better else max)(reached) if reached else None


def _measures(
    runs: Sequence[AnalysedRun | None],
    comparison: Comparison,
    target: float | None,
    ceiling: Mapping[int, float],
) -> dict[Measure, Estimate]:
    done = [run for run in runs if run is not None]

    def of_runs(read: Callable[[AnalysedRun], float | None]) -> list[float | None]:
        return [None if run is None else read(run) for run in runs]

    reached = [reach(run, target, comparison.higher_is_better) for run in runs]
    block_s = [s for run in done for s in run.steps.block_step_s()]
    step_s = of_runs(lambda run: float(np.median(run.steps.block_step_s())))
    block_rates = [rate for run in done for rate in run.steps.block_samples_per_s()]
    rates = of_runs(_samples_per_s)
    best = float(np.median(list(ceiling.values()))) if ceiling else None
    is_share = comparison.higher_is_better and all(
        0 <= evaluation.metric <= 1 for run in done for evaluation in run.evaluations
    )
    measures: dict[Measure, Estimate] = {
        "time_to_target_s": estimate([None if r is None else r[0] for r in reached]),
        "steps_to_target": estimate([None if r is None else r[1] for r in reached]),
        "final_metric": estimate(
            of_runs(lambda run: run.summary.metric), most=1.0 if is_share else None
        ),
        "step_s": estimate(step_s, block_s),
        "steps_per_s": estimate([s and 1 / s for s in step_s], [1 / s for s in block_s]),
        "samples_per_s": estimate(rates, block_rates),
        "bytes_per_step": estimate(of_runs(lambda run: run.steps.per_step(run.steps.bytes_sent))),
        "messages_per_step": estimate(
            of_runs(lambda run: run.steps.per_step(run.steps.messages_sent))
        ),
        "peak_memory_bytes": estimate(of_runs(lambda run: max(run.summary.peak_memory_bytes))),
    }
    if best:
        measures["efficiency"] = estimate(
            [
                rate and rate / ceiling.get(seed, best)
                for seed, rate in zip(comparison.seeds, rates, strict=True)
            ],
            [rate / best for rate in block_rates],
        )
    shares = [None if run is None else run.steps.settled().shares() for run in runs]
    for name, phase in _PHASES.items():
        measures[name] = estimate([None if share is None else share[phase] for share in shares])
    return measures


def _samples_per_s(run: AnalysedRun) -> float:
    return float(np.median(run.steps.block_samples_per_s()))


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


def _notices(runs: Sequence[AnalysedRun | None], seeds: Sequence[int]) -> list[str]:
    """What the summaries say, once; with its seed where other runs do not say the same."""
    done = {seed: run for seed, run in zip(seeds, runs, strict=True) if run is not None}
    said = {
        notice: [seed for seed, run in done.items() if notice in run.summary.notices]
        for one in done.values()
        for notice in one.summary.notices
    }
    notices = [
        notice if len(by) == len(done) else f"seed {', '.join(map(str, by))}: {notice}"
        for notice, by in said.items()
    ]
    if num_diverged := sum(run.diverged for run in done.values()):
        notices.insert(
            0,
            f"training diverged in {num_diverged} of {len(done)} runs: the metric was no number at"
            " the end",
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
    """Every pair of strategies, by the time to the target and by the time of a step."""
    able = [strategy for strategy in comparison.strategies if strategy.label in samples]
    found = []
    for place, a in enumerate(able):
        for b in able[place + 1 :]:
            for measure in ("time_to_target_s", "step_s"):
                first, second = a.measures[measure], b.measures[measure]
                if not first.median or not second.median:
                    continue
                # Whoever misses the target in some run is no faster for those that reach it.
                if measure == "time_to_target_s" and None in [*first.values, *second.values]:
                    continue
                fine = (samples[a.label], samples[b.label]) if measure == "step_s" else (None, None)
                ratio = compare(first, second, *fine)
                found.append(
                    Difference(measure=measure, a=a.label, b=b.label, **ratio.model_dump())
                )
    return found


def between(comparison: Comparison, measure: Measure, a: str, b: str) -> Difference | None:
    """The difference from `a` to `b`, whichever way round it is stored; None if there is none.

    Args:
        comparison: with its differences.
        measure: which of them.
        a, b: labels of two strategies.
    """
    for found in comparison.differences:
        if found.measure == measure and (found.a, found.b) == (a, b):
            return found
        if found.measure == measure and (found.b, found.a) == (a, b):
            return _turned(found)
    return None


def ranking(comparison: Comparison, measure: Measure) -> list[ComparedStrategy]:
    """Those that have a median of `measure`, the least first."""
    able = [
        c
        for c in comparison.strategies
        if measure in c.measures and c.measures[measure].median is not None
    ]
    return sorted(able, key=lambda strategy: strategy.measures[measure].median or 0.0)


def winner(comparison: Comparison) -> ComparedStrategy | None:
    """The strategy that the verdict speaks of: the first to reach the target in all its runs, else
    the one with the shortest steps. Whether it is ahead beyond the spread is for the verdict to
    say. None where nothing finished.
    """
    complete = _complete(comparison)
    if len(complete) > 1 and not complete[0].measures["time_to_target_s"].median:
        complete = []  # it was reached before the first step, and the verdict is of steps
    order = complete or ranking(comparison, "step_s")
    return order[0] if order else None


def _complete(comparison: Comparison) -> list[ComparedStrategy]:
    """Those that reached the target in every run, the fastest first."""
    if comparison.target is None:
        return []
    order = ranking(comparison, "time_to_target_s")
    return [c for c in order if None not in c.measures["time_to_target_s"].values]


def verdict(comparison: Comparison) -> str:
    """Which strategy is best, in one sentence, or that none is."""
    if comparison.target is None:
        return _step_verdict(comparison)
    goal = f"{comparison.metric_name.replace('_', ' ')} {comparison.target:.4g}"
    complete = _complete(comparison)
    if len(complete) < 2:
        return _verdict_for_few(comparison, goal, complete)
    first, second, last = complete[0], complete[1], complete[-1]
    if not first.measures["time_to_target_s"].median:
        return f"{_step_verdict(comparison)[:-1]}; {goal} was reached before the first step."
    difference = between(comparison, "time_to_target_s", second.label, first.label)
    assert difference is not None
    took_s = _seconds(first, "time_to_target_s")
    if len(first.runs) == 1:
        return (
            f"In the only run of each, {first.label} was the first to reach {goal}, in {took_s};"
            f" {_step_verdict(comparison, said=first.label)}"
        )
    if difference.decided:
        return (
            f"{first.label} reached {goal} in {took_s}, {write(difference.ratio, RATIO)} times"
            f" faster than {second.label}, the next best."
        )
    equals = _undecided(comparison, "time_to_target_s", complete)
    rest = (
        f"; {last.label} took {_seconds(last, 'time_to_target_s')}"
        if last.label not in equals
        else ""
    )
    return (
        f"No difference in the time to {goal} between {_listed(equals)} that this"
        f" comparison can see{rest}."
    )


def _verdict_for_few(
    comparison: Comparison, goal: str, complete: Sequence[ComparedStrategy]
) -> str:
    """The verdict where at most one strategy reached the target in every run."""
    if len(ranking(comparison, "step_s")) < 2:
        return _step_verdict(comparison)
    if not complete:
        return f"{_step_verdict(comparison)[:-1]}; none of them reached {goal} in every run."
    return (
        f"Only {complete[0].label} reached {goal} in every run, in"
        f" {_seconds(complete[0], 'time_to_target_s')}."
    )


def _step_verdict(comparison: Comparison, *, said: str | None = None) -> str:
    """Which strategy takes the shortest steps, or that none does.

    Args:
        comparison: with its differences.
        said: the label that a sentence has begun with, which goes on with this.
    """
    order = ranking(comparison, "step_s")
    if not order:
        return "No strategy finished."
    if len(order) == 1:
        only = "Only " if len(comparison.strategies) > 1 else ""
        return f"{only}{order[0].label} finished: {_seconds(order[0], 'step_s')} a step."
    first, second = order[0], order[1]
    difference = between(comparison, "step_s", second.label, first.label)
    assert difference is not None
    if difference.decided:
        who = "it" if first.label == said else first.label
        return (
            f"{who} takes the shortest steps, {_seconds(first, 'step_s')}:"
            f" {write(difference.ratio, RATIO)} times faster than {second.label}, the next best."
        )
    equals = _undecided(comparison, "step_s", order)
    return (
        f"{'no' if said else 'No'} difference in step time between"
        f" {_listed(equals)} that this comparison can see."
    )


def findings(comparison: Comparison) -> list[str]:
    """What else is worth knowing, a sentence each: failures, each strategy against DDP, the metric,
    who is slow.
    """
    found = [
        f"{c.label} failed: {c.failure}" for c in comparison.strategies if c.failure is not None
    ]
    order = ranking(comparison, "step_s")
    found += _next_best(comparison)
    reference = next(
        (c for name in ("ddp", "allreduce") for c in order if c.strategy == name), None
    )
    if reference is not None:
        for strategy in order:
            difference = between(comparison, "step_s", reference.label, strategy.label)
            if strategy is not reference and difference is not None:
                found.append(_against(reference, strategy, difference))
    found += _metric_gaps(comparison)
    if comparison.target is not None:
        for strategy in comparison.strategies:
            missed = (
                sum(value is None for value in strategy.measures["time_to_target_s"].values)
                if strategy.measures
                else 0
            )
            if missed:
                runs = f"{missed} of its {len(strategy.runs)} runs"
                found.append(f"{strategy.label} did not reach {comparison.target:.4g} in {runs}.")
    return found + _above_the_ideal(comparison) + _slow_worker(order)


def _next_best(comparison: Comparison) -> list[str]:
    """How sure the verdict's factor is."""
    races: list[tuple[Measure, str, list[ComparedStrategy]]] = [
        ("time_to_target_s", "the time to the target", _complete(comparison)),
        ("step_s", "the time of a step", ranking(comparison, "step_s")),
    ]
    for measure, what, order in races:
        if len(order) > 1:
            found = between(comparison, measure, order[1].label, order[0].label)
            if found is not None and found.decided and found.low is not None:
                return [
                    f"{order[0].label} against {order[1].label}, the next best in {what}:"
                    f" {_times(found)} faster."
                ]
    return []


def _against(
    reference: ComparedStrategy, strategy: ComparedStrategy, difference: Difference
) -> str:
    steps = (
        f"{strategy.label} takes {_seconds(strategy, 'step_s')} a step, {reference.label}"
        f" {_seconds(reference, 'step_s')}"
    )
    if not difference.decided:
        return f"{steps}: no difference larger than the spread."
    faster = difference.ratio > 1
    times = _times(difference) if faster else _times(_turned(difference))
    return f"{steps}: {times} {'faster' if faster else 'slower'}."


def _metric_gaps(comparison: Comparison) -> list[str]:
    """By how much final metrics differ from the dense ones at equal steps, seed by seed."""
    reference = next(
        (c for c in comparison.strategies if c.strategy in ("ddp", "allreduce") and c.measures),
        None,
    )
    if reference is None or not (base := reference.measures["final_metric"]).median:
        return []
    name = comparison.metric_name.replace("_", " ")
    gaps = []
    for strategy in comparison.strategies:
        metric = strategy.measures["final_metric"] if strategy.measures else None
        if strategy is reference or metric is None or metric.median is None:
            continue
        pairs = zip(metric.values, base.values, strict=True)
        gap = estimate([None if x is None or y is None else x - y for x, y in pairs], signed=True)
        gaps.append(
            f"After {comparison.steps} steps {strategy.label} has {name}"
            f" {write(metric.median, NUMBER)}, {reference.label} {write(base.median, NUMBER)}:"
            f" {_gap_text(gap, higher_is_better=comparison.higher_is_better)}."
        )
    return gaps


def _gap_text(gap: Estimate, *, higher_is_better: bool) -> str:
    known = [value for value in gap.values if value is not None]
    # A script that sets its own seed repeats itself: then nothing is known of the spread.
    if len(known) < LEAST_SEEDS or (any(known) and len(set(known)) == 1):
        return f"whether they differ takes {LEAST_SEEDS} runs of different seeds to say"
    assert gap.median is not None
    assert gap.low is not None
    assert gap.high is not None
    if gap.low <= 0 <= gap.high:
        return "no difference larger than the spread"
    how = "better" if (gap.median > 0) == higher_is_better else "worse"
    near, far = sorted(abs(end) for end in (gap.low, gap.high))
    return f"{write(near, NUMBER)} to {write(far, NUMBER)} {how}"


def _above_the_ideal(comparison: Comparison) -> list[str]:
    """Why a strategy can be faster than workers that exchange nothing."""
    above = [
        f"{strategy.label} at {write(part, SHARE)}"
        for strategy in comparison.strategies
        if "efficiency" in strategy.measures
        and (part := strategy.measures["efficiency"].median or 0.0) > 1
    ]
    if not above:
        return []
    return [
        f"Against workers that exchange nothing {_listed(above)}: those were measured by"
        " themselves, and where workers share cores, one that waits leaves its core to others, so"
        " more than 100% is no gain."
    ]


def _slow_worker(order: Sequence[ComparedStrategy]) -> list[str]:
    """The worker that its peers wait for, and how long under the first strategy that says so."""
    waiting = [strategy for strategy in order if strategy.lateness_s]
    slow = slow_worker_of(strategy.slow_worker for strategy in waiting)
    if slow is None:
        return []
    strategy = next(strategy for strategy in waiting if strategy.slow_worker == slow)
    lag = write(strategy.lateness_s[slow], SECONDS)
    return [
        f"Worker {slow} is the slow one: under {strategy.label} it comes to the exchange {lag}"
        " after the first worker on average."
    ]


def _undecided(
    comparison: Comparison, measure: Measure, order: Sequence[ComparedStrategy]
) -> list[str]:
    """The labels of the first, and of those that nobody in this list is decidedly ahead of: with a
    wide spread the first may be as fast as two others of which one is faster than the other.
    """
    equals: list[ComparedStrategy] = []
    for strategy in order:
        apart = (between(comparison, measure, strategy.label, ahead.label) for ahead in equals)
        if not any(difference is not None and difference.decided for difference in apart):
            equals.append(strategy)
    return [strategy.label for strategy in equals]


def _turned(difference: Difference) -> Difference:
    low, high = (
        (None, None)
        if difference.low is None or difference.high is None
        else (1 / difference.high, 1 / difference.low)
    )
    return difference.model_copy(
        update={
            "a": difference.b,
            "b": difference.a,
            "ratio": 1 / difference.ratio,
            "low": low,
            "high": high,
        }
    )


def _times(difference: Difference) -> str:
    times = f"{write(difference.ratio, RATIO)} times"
    if difference.low is None or difference.high is None:
        return times
    return f"{times} ({write(difference.low, RATIO)} to {write(difference.high, RATIO)})"


def _seconds(strategy: ComparedStrategy, measure: Measure) -> str:
    return write(strategy.measures[measure].median, MEASURES[measure].unit)


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
