"""What averaging weights costs in quality: each strategy against AllReduce after equally many
steps, eight workers.

Links are those of loopback, but steps are padded and two random workers are half a step late in
each of them, so that averages are as stale as they are among stragglers. Steps of `sequences` are
not: their lengths differ by the data. All strategies start from the same parameters and see the
same samples in the same order, seed by seed. A strategy's metric is the mean of its last three
measurements: a single one of `digits` counts images in steps of 0.28 points. The target is what
AllReduce has reached on average after 60% of the steps.

    gap to AllReduce: at most 0.3 points of accuracy, 1% of bits; steps to the target at most 1.05
    times as many

`images`, where each worker has few of the labels, `mnist` and `charlm` need `--images`, `--mnist`
and `--text`; without them they are left out. Each run is a cell, so the benchmark may be stopped
between them; a table of all strategies goes to standard error. It has a row for each of
`--strategies`, so name all of them each time.

    python benchmarks/studies/averaging_accuracy.py [--json] [--quick] [--images NPZ] [--mnist NPZ]
        [--text FILE] [--tasks NAME,...]
        [--strategies SPEC,...] [--seeds N] [--keep DIRECTORY] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

import _benchmarks  # noqa: F401
from _measure import Cells, Ratio, Row, add_output_options, origin, present
from _results import Figure, ResultFile
from links import watched
from offbeat_lab.cluster import Cluster, Straggling
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.records import Record
from offbeat_lab.statistics import Estimate, estimate

WORKERS = 8
BASELINE = "allreduce"
JUDGED = ("wagma", "wagma:merge=paper")
STRATEGIES = (
    BASELINE,
    *JUDGED,
    *(
        "localsgd:period=10:warmup=0:optimizer_state=local",
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
        "wagma:interval=10",
    ),
)
"""The first of all is what the rest are held against. `interval=10` is local SGD with a quorum."""
CHARLM_LR = 0.02
"""Of 0.003, 0.01, 0.02 and 0.04 the one with which AllReduce gets furthest."""
SKEW = 0.3
SEQUENCES = (
    *("longest=128", "optimizer=adamw", "lr=0.003"),
    *("lr_warmup=0.0625", "lr_schedule=cosine"),
)
MEASUREMENTS = 20
LAST = 3
TARGET_AT = 0.6
_ONE_TURN_S = 1e6
Curve: TypeAlias = Sequence[tuple[int, float]]
"""Steps done, and the metric, of each measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task. `step_s`: to which steps are padded; None: they take what they take, and nobody is
    late. `goal`: the largest gap, in `unit`; a gap is relative where the unit is "%", else in
    hundredths.
    """

    task: str
    steps: int
    settings: tuple[str, ...] = ()
    batch_size: int = 8
    step_s: float | None = 0.03
    higher_is_better: bool = True
    goal: float = 0.3
    unit: str = "points"

    @property
    def every(self) -> int:
        """Steps from one measurement to the next."""
        return max(1, self.steps // MEASUREMENTS)

    def gap(self, metric: float, baseline: float) -> float:
        """How much worse `metric` is than `baseline`, in `unit`."""
        worse = 100 * (baseline - metric if self.higher_is_better else metric - baseline)
        return worse / baseline if self.unit == "%" else worse

    def curve(self, metrics: Sequence[float | None]) -> Curve:
        return [
            (place * self.every, metric)
            for place, metric in enumerate(metrics)
            if metric is not None
        ]


@dataclass(kw_only=True, slots=True)
class Found:
    """One strategy's curves, by seed."""

    curves: dict[int, Curve] = field(default_factory=dict)

    def metric(self, seed: int) -> float | None:
        seen = self.curves.get(seed, ())
        return float(np.mean([one for _, one in seen[-LAST:]])) if len(seen) >= LAST else None


def cases_of(images: Path | None, mnist: Path | None, text: Path | None) -> Iterator[Case]:
    yield Case(task="digits", steps=400)
    if images is not None:
        network = ("width=16", "shrink=2", "lr=0.025", "momentum=0.9", "lr_schedule=linear")
        settings: tuple[str, ...] = (f"path={images}", *network, "lr_warmup=0.0625", f"skew={SKEW}")
        yield Case(task="images", settings=settings, steps=400, step_s=0.06)
    yield Case(
        task="sequences",
        settings=SEQUENCES,
        steps=300,
        batch_size=4,
        step_s=None,
        higher_is_better=False,
        goal=1.0,
        unit="%",
    )
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


class Runs:
    """The runs of one task, in a cell for each strategy and seed, and the table of them."""

    def __init__(
        self,
        case: Case,
        specs: Sequence[str],
        seeds: Sequence[int],
        keep: Path,
        kept: ResultFile | None,
    ) -> None:
        self._case = case
        self._specs = specs
        self._seeds = seeds
        self._keep = keep
        self._kept = kept
        self._metrics: dict[str, Sequence[float | None]] = {}

    def cells(self) -> Cells:
        runs = {
            self._name(spec, seed): partial(self._run, spec, seed)
            for seed in self._seeds
            for spec in self._specs
        }
        table = self._case.task
        if self._kept is not None and table in self._kept.cells:
            told = {each.figure.case for each in self._kept.results if each.figure.table == table}
            if told != set(self._specs) or not runs.keys() <= self._kept.cells:
                self._kept.replace(table, [], origin(None))  # of other runs
        return {**runs, table: self._table}

    def _name(self, spec: str, seed: int) -> str:
        return f"{self._case.task}, {spec}, seed {seed}"

    def _run(self, spec: str, seed: int) -> Iterator[Row]:
        case = self._case
        late = () if case.step_s is None else (Straggling(workers=2, delay_s=case.step_s / 2),)
        request = CompareRequest(
            task=case.task,
            strategies=[spec],
            settings=(f"batch_size={case.batch_size}", *case.settings),
            cluster=Cluster(workers=WORKERS, straggling=late, step_s=case.step_s),
            seeds=[seed],
            steps=case.steps,
            eval_every=case.every,
            turn_s=_ONE_TURN_S,
        )
        name = self._name(spec, seed)
        plan = plan_comparison(request, out=self._keep / name.replace(", ", "-").replace(" ", "-"))
        directory, comparison = watched(plan)
        (strategy,) = comparison.strategies
        if strategy.failure is not None:
            print(f"{name} failed: {strategy.failure}", file=sys.stderr)
            return
        seen = Record(directory / strategy.runs[0]).evaluations()
        print(f"{name}: {seen[-1].metric:.4f}", file=sys.stderr)
        self._metrics[name] = tuple(one.metric for one in seen)
        yield Figure(
            table=f"{case.task}, all runs",
            case=f"{spec}, seed {seed}",
            column=f"every {case.every} steps",
            value=tuple(one.metric for one in seen),
            decimals=3,
        )

    def _table(self) -> Iterator[Row]:
        found = {spec: Found() for spec in self._specs}
        for spec, one in found.items():
            for seed in self._seeds:
                metrics = self._known(self._name(spec, seed))
                if metrics:
                    one.curves[seed] = self._case.curve(metrics)
        if len(found[BASELINE].curves) < len(self._seeds):
            raise SystemExit(f"{BASELINE} failed")
        yield from figures(self._case, found, self._seeds)
        yield from goals(self._case, found, self._seeds)

    def _known(self, name: str) -> Sequence[float | None]:
        if name in self._metrics or self._kept is None:
            return self._metrics.get(name, ())
        values = [each.figure.value for each in self._kept.results if each.cell == name]
        return next((value for value in values if isinstance(value, tuple)), ())


def gaps(case: Case, one: Found, baseline: Found, seeds: Sequence[int]) -> Estimate:
    """By seed, how much worse than the baseline."""
    pairs = [(one.metric(seed), baseline.metric(seed)) for seed in seeds]
    return estimate(
        [None if None in pair else case.gap(*pair) for pair in pairs],  # type: ignore[arg-type]
        signed=True,
    )


def steps_to_target(case: Case, one: Found, target: float, seeds: Sequence[int]) -> Estimate:
    """By seed, when the metric first reached `target`, on straight lines between measurements; None
    where it never did.
    """
    return estimate([_reached(case, one.curves.get(seed, ()), target) for seed in seeds])


def _reached(case: Case, curve: Curve, target: float) -> float | None:
    sign = 1 if case.higher_is_better else -1
    best = np.maximum.accumulate([sign * metric for _, metric in curve]) if curve else np.empty(0)
    if not best.size or best[-1] < sign * target:
        return None
    after = int(np.argmax(best >= sign * target))
    span = slice(max(0, after - 1), after + 1)
    return float(np.interp(sign * target, best[span], [float(step) for step, _ in curve[span]]))


def target_of(case: Case, baseline: Found) -> float:
    at = TARGET_AT * case.steps
    return float(np.mean([np.interp(at, *np.array(one).T) for one in baseline.curves.values()]))


def figures(case: Case, found: Mapping[str, Found], seeds: Sequence[int]) -> Iterator[Figure]:
    """What the page shows of each strategy. Where none of its runs ended, that has been said."""
    baseline = found[BASELINE]
    target = target_of(case, baseline)
    print(f"{case.task}, {case.steps} steps, target {target:.4f}", file=sys.stderr)
    for spec, one in found.items():
        metrics = [metric for seed in seeds if (metric := one.metric(seed)) is not None]
        if not metrics:
            continue
        cell = partial(Figure, table=case.task, case=spec)
        yield cell(column="metric", value=float(np.mean(metrics)), decimals=4)
        for other in (BASELINE, JUDGED[0]):
            if other in found and other != spec:
                gap = gaps(case, one, found[other], seeds)
                known = [value for value in gap.values if value is not None]
                yield cell(
                    column=f"worse than {other}, {case.unit}",
                    value=float(np.mean(known)) if known else None,
                    interval=None if gap.low is None or gap.high is None else (gap.low, gap.high),
                    decimals=2,
                )
        steps = steps_to_target(case, one, target, seeds)
        yield cell(column="steps to the target", value=steps.median, decimals=0)
        yield cell(column="seeds that missed the target", value=steps.values.count(None))


def goals(case: Case, found: Mapping[str, Found], seeds: Sequence[int]) -> Iterator[Ratio]:
    baseline = found[BASELINE]
    target = target_of(case, baseline)
    for spec in JUDGED:
        one = found.get(spec)
        if one is None:
            continue
        if len(one.curves) < len(seeds):
            raise SystemExit(f"{spec} failed")
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
        kept = asked.results and ResultFile(asked.results / "averaging_accuracy.jsonl")
        cells: dict[str, Callable[[], Iterable[Row]]] = {}
        for case in cases:
            cells |= Runs(case, specs, range(seeds), directory, kept).cells()
        present(cells, asked, seeds=seeds)


if __name__ == "__main__":
    main()
