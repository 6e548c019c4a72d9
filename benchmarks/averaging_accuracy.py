"""What averaging weights costs in quality: each strategy against AllReduce after equally many
steps, eight workers.

Links are those of loopback, but steps are padded and two random workers are half a step late in
each of them, so that averages are as stale as they are among stragglers. All strategies start from
the same parameters and see the same samples in the same order, seed by seed. A strategy's metric is
the mean of its last three measurements: a single one of `digits` counts images in steps of 0.28
points. The target is what AllReduce has reached on average after 60% of the steps.

    gap to AllReduce: at most 0.3 points of accuracy, 1% of bits per character; steps to the target
    at most 1.05 times as many

`images`, where each worker has few of the labels, `mnist` and `charlm` need `--images`, `--mnist`
and `--text`; without them they are left out. A table of all
strategies and of WAGMA's ablations goes to standard error.

    python benchmarks/averaging_accuracy.py [--json] [--quick] [--images NPZ] [--mnist NPZ]
        [--text FILE] [--tasks NAME,...]
        [--strategies SPEC,...] [--seeds N] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from _measure import Ratio, Row, add_output_options, present
from _results import Figure
from links import Quiet
from offbeat.lab.cluster import Cluster, Straggling
from offbeat.lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat.lab.options import build_strategy, parse_spec
from offbeat.lab.records import Evaluation, Record
from offbeat.lab.statistics import Estimate, estimate

WORKERS = 8
BASELINE = "allreduce"
JUDGED = ("wagma", "wagma:merge=paper")
STRATEGIES = (
    BASELINE,
    *JUDGED,
    *(
        "localsgd:period=10",
        "dpsgd",
        "sgp",
        "adpsgd",
        "eagersgd:mode=solo",
        "eagersgd:mode=majority",
    ),
    *(f"wagma:group_size={size}" for size in (2, 4, 8)),
    *(
        "wagma:quorum=1",
        "wagma:overlap=true",
        "wagma:overlap=false",
        "wagma:groups=fixed",
        "wagma:groups=off",
    ),
)
"""The first of all is what the rest are held against. `groups=off` is local SGD with a quorum."""
CHARLM_LR = 0.02
"""Of 0.003, 0.01, 0.02 and 0.04 the one with which AllReduce gets furthest."""
SKEW = 0.3
TOGETHER = 3
MEASUREMENTS = 20
LAST = 3
TARGET_AT = 0.6
_ONE_TURN_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task. `goal`: the largest gap, in `unit`; a gap is relative where the unit is "%", else
    in hundredths.
    """

    task: str
    steps: int
    settings: tuple[str, ...] = ()
    step_s: float = 0.03
    higher_is_better: bool = True
    goal: float = 0.3
    unit: str = "points"

    def gap(self, metric: float, baseline: float) -> float:
        """How much worse `metric` is than `baseline`, in `unit`."""
        worse = 100 * (baseline - metric if self.higher_is_better else metric - baseline)
        return worse / baseline if self.unit == "%" else worse


@dataclass(kw_only=True, slots=True)
class Found:
    """One strategy's measurements, by seed. `failure`: why there are none."""

    evaluations: dict[int, Sequence[Evaluation]] = field(default_factory=dict)
    failure: str = ""

    def metric(self, seed: int) -> float | None:
        seen = self.evaluations.get(seed, ())
        return (
            float(np.mean([evaluation.metric for evaluation in seen[-LAST:]]))
            if len(seen) >= LAST
            else None
        )


def cases_of(images: Path | None, mnist: Path | None, text: Path | None) -> Iterator[Case]:
    yield Case(task="digits", steps=400)
    if images is not None:
        network = ("width=16", "shrink=2", "lr=0.025", "momentum=0.9", "lr_schedule=linear")
        settings = (f"path={images}", *network, "lr_warmup=0.0625", f"skew={SKEW}")
        yield Case(task="images", settings=settings, steps=400, step_s=0.06)
    if mnist is not None:
        yield Case(task="mnist", settings=(f"path={mnist}",), steps=500)
    if text is not None:
        settings = (f"path={text}", f"lr={CHARLM_LR}")
        yield Case(
            task="charlm",
            settings=settings,
            steps=400,
            step_s=0.06,
            higher_is_better=False,
            goal=1.0,
            unit="%",
        )


def measure(case: Case, specs: Sequence[str], seeds: Sequence[int], keep: Path) -> dict[str, Found]:
    """Run all strategies with all seeds, a few strategies at a time, and read their records."""
    late = Straggling(workers=2, delay_s=case.step_s / 2)
    found = {spec: Found() for spec in specs}
    for first in range(0, len(specs), TOGETHER):
        chunk = specs[first : first + TOGETHER]
        request = CompareRequest(
            task=case.task,
            strategies=chunk,
            settings=("batch_size=8", *case.settings),
            cluster=Cluster(workers=WORKERS, straggling=(late,), step_s=case.step_s),
            seeds=seeds,
            steps=case.steps,
            eval_every=max(1, case.steps // MEASUREMENTS),
            turn_s=_ONE_TURN_S,
        )
        plan = plan_comparison(request, out=keep / f"{case.task}-{first}")
        directory, comparison = run_comparison(
            plan, Quiet(), command="python benchmarks/averaging_accuracy.py"
        )
        for spec, contestant in zip(chunk, comparison.contestants, strict=True):
            found[spec].failure = contestant.failure or ""
            for seed, run in zip(seeds, contestant.runs, strict=True):
                if contestant.failure is None:
                    found[spec].evaluations[seed] = Record(directory / run).evaluations()
        print(f"{case.task}: {', '.join(chunk)} done", file=sys.stderr)
    return found


def gaps(case: Case, one: Found, baseline: Found, seeds: Sequence[int]) -> Estimate:
    """By seed, how much worse than the baseline."""
    pairs = [(one.metric(seed), baseline.metric(seed)) for seed in seeds]
    return estimate([None if None in pair else case.gap(*pair) for pair in pairs])  # type: ignore[arg-type]


def steps_to_target(case: Case, one: Found, target: float, seeds: Sequence[int]) -> Estimate:
    """By seed, when the metric first reached `target`, on straight lines between measurements; None
    where it never did.
    """
    return estimate([_reached(case, one.evaluations.get(seed, ()), target) for seed in seeds])


def _reached(case: Case, seen: Sequence[Evaluation], target: float) -> float | None:
    sign = 1 if case.higher_is_better else -1
    best = (
        np.maximum.accumulate([sign * evaluation.metric for evaluation in seen])
        if seen
        else np.empty(0)
    )
    if not best.size or best[-1] < sign * target:
        return None
    after = int(np.argmax(best >= sign * target))
    span = slice(max(0, after - 1), after + 1)
    return float(
        np.interp(sign * target, best[span], [float(evaluation.step) for evaluation in seen[span]])
    )


def target_of(case: Case, baseline: Found) -> float:
    step = TARGET_AT * case.steps
    return float(
        np.mean(
            [
                np.interp(step, [e.step for e in seen], [e.metric for e in seen])
                for seen in baseline.evaluations.values()
            ]
        )
    )


def figures(case: Case, found: dict[str, Found], seeds: Sequence[int]) -> Iterator[Figure]:
    """What the page shows of each strategy; a failed one is said on standard error."""
    baseline = found[BASELINE]
    target = target_of(case, baseline)
    print(f"{case.task}, {case.steps} steps, target {target:.4f}", file=sys.stderr)
    for spec, one in found.items():
        metrics = [metric for seed in seeds if (metric := one.metric(seed)) is not None]
        if one.failure or not metrics:
            print(f"{case.task}: {spec} failed: {one.failure}", file=sys.stderr)
            continue
        cell = partial(Figure, table=case.task, case=spec)
        gap, steps = gaps(case, one, baseline, seeds), steps_to_target(case, one, target, seeds)
        yield cell(column="metric", value=float(np.mean(metrics)), decimals=4)
        yield cell(
            column=f"worse than {BASELINE}, {case.unit}",
            value=float(np.mean([value for value in gap.values if value is not None])),
            interval=None if gap.low is None or gap.high is None else (gap.low, gap.high),
            decimals=2,
        )
        yield cell(column="steps to the target", value=steps.median, decimals=0)
        yield cell(column="seeds that missed the target", value=float(steps.values.count(None)))


def goals(case: Case, found: dict[str, Found], seeds: Sequence[int]) -> Iterator[Ratio]:
    baseline = found[BASELINE]
    target = target_of(case, baseline)
    for spec in JUDGED:
        one = found.get(spec)
        if one is None:
            continue
        if one.failure:
            raise SystemExit(f"{spec} failed: {one.failure}")
        gap = gaps(case, one, baseline, seeds)
        yield _ratio(
            f"{case.task}, {spec} worse than {BASELINE}", gap, case.goal, case.unit, bound=0.0
        )
        by_seed = zip(
            steps_to_target(case, one, target, seeds).values,
            steps_to_target(case, baseline, target, seeds).values,
            strict=True,
        )
        # a run that never gets there is counted as if it took twice the steps there were
        more = estimate([(mine or 2 * case.steps) / theirs for mine, theirs in by_seed if theirs])
        yield _ratio(
            f"{case.task}, {spec}, steps to the target over {BASELINE}'s",
            more,
            1.05,
            "x",
            bound=1.0,
        )


def _ratio(case: str, value: Estimate, at_most: float, unit: str, *, bound: float) -> Ratio:
    known = [number for number in value.values if number is not None]
    mean = float(np.mean(known))
    low, high = (mean, mean) if value.low is None or value.high is None else (value.low, value.high)
    return Ratio(
        case=case,
        value=mean,
        unit=unit,
        goal=f"at most {at_most:g}",
        holds="undecided" if low <= at_most < high else high <= at_most,
        bound=bound,
        interval=(low, high),
    )


def run(case: Case, specs: Sequence[str], seeds: Sequence[int], directory: Path) -> Iterator[Row]:
    found = measure(case, specs, seeds, directory)
    if found[BASELINE].failure:
        raise SystemExit(f"{BASELINE} failed: {found[BASELINE].failure}")
    yield from figures(case, found, seeds)
    yield from goals(case, found, seeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed of the first task, 40 steps: only to see that it runs",
    )
    parser.add_argument("--images", type=Path, help="npz file of photographs")
    parser.add_argument("--mnist", type=Path, help="npz file of mnist")
    parser.add_argument("--text", type=Path, help="text for charlm")
    parser.add_argument("--tasks", help="only these, such as digits,mnist")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="how many; default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    asked = parser.parse_args()
    cases = [
        case
        for case in cases_of(asked.images, asked.mnist, asked.text)
        if asked.tasks is None or case.task in asked.tasks.split(",")
    ]
    specs = list(dict.fromkeys([BASELINE, *asked.strategies.split(",")]))
    for spec in specs:
        build_strategy(*parse_spec(spec))  # before an hour is spent on those before it
    if asked.quick:
        cases = [replace(cases[0], steps=40)]
    with tempfile.TemporaryDirectory() as temporary:
        seeds, directory = 1 if asked.quick else asked.seeds, asked.keep or Path(temporary)
        cells = {case.task: partial(run, case, specs, range(seeds), directory) for case in cases}
        present(cells, asked, seeds=seeds)


if __name__ == "__main__":
    main()
