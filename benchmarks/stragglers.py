"""What stragglers cost each strategy: eight workers behind emulated links of 1 Gbit/s, steps padded
to 100 ms.

First two random workers are 50 ms late in each step, with two sizes of model; then one worker is
half as fast for good, and its peers are looked at. A strategy's figure is its fraction of the
ideal: the mean step without any exchange, measured in the same round, over its own mean step.
Beside it stands the ceiling, the same fraction if communication took no time, for just the delays
that were drawn (`_ceilings`). A run is a single turn: in a pause late workers would catch
up for nothing. Everything is printed to standard error; the cases are WAGMA's goals.

    at least 98% of the ceiling where all workers meet after every ten of their own steps; the bound
    is the ceiling where they meet as soon as one of them has done ten at most 2 N (S-1) / S bytes a
    rank and step, for a model of N bytes in groups of S, and S = 8 in every tenth step

With `--to-target` it is about the time to several accuracies: the strategies as they come, two
sizes of model, two random workers late. The last accuracy is the best that all strategies reach
with a seed. Beside it stands what a rank's step takes of a processor, measuring the accuracy
included, since eight ranks share cores here. Three strategies and a seed are a cell, so the
benchmark may be stopped between them.

    with 4 MB: WAGMA at least 0.85 of the ideal, and at each accuracy before LocalSGD

    python benchmarks/stragglers.py [--json] [--quick] [--to-target] [--strategies SPEC,...]
    [--sizes SIZE,...] [--seeds N] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from _ceilings import (
    Durations,
    Utilisation,
    on_first_call,
    periodic,
    with_neighbours,
)
from _measure import Cells, Ratio, Row, add_output_options, origin, present
from _results import Figure, ResultFile, Value
from links import Quiet, watched
from offbeat.arithmetic.topologies import exponential_peers, ring_weights
from offbeat.run.progress import WorkerProgress
from offbeat.strategies.registry import ALONE
from offbeat_lab.breakdown import Steps, read_steps
from offbeat_lab.cluster import Cluster, LinkSpec, Straggling
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.records import Record
from offbeat_lab.statistics import Estimate, estimate, num_warm_up

WORKERS = 8
PERIOD = 10
STEP_S = 0.1
DELAY_S = 0.05
SLOW_RANK = 7
STEPS = 80
LOCAL = f"localsgd:period={PERIOD}:warmup=0:optimizer_state=local"
"""As published."""
STRICT, QUORUM = "wagma:group_size=4:quorum=1", "wagma:group_size=4:quorum=0.75"
STRATEGIES = (
    *(
        "allreduce",
        LOCAL,
        "dpsgd",
        "sgp",
        "adpsgd",
        "eagersgd:mode=solo",
        "eagersgd:mode=majority",
    ),
    *(STRICT, QUORUM),
)
AGAINST_A_SLOW_ONE = (LOCAL, "adpsgd", QUORUM)
SIZES = ("size=tiny", "size=tiny:hidden=760", "size=small")
"""0.105, 0.40 and 1.01 million parameters: 0.42, 1.6 and 4.05 MB, so 0.63, 2.4 and 6.1 MB a step in
groups of four, of which a link carries 12. The last is more than eight workers on two cores can
encrypt, add up and train with.
"""
TOGETHER = 3
"""So many strategies are alive at once, and each such round has its own measurement of the ideal.
"""
RACERS = (
    *("wagma", "allreduce", LOCAL, "adpsgd"),
    *("dpsgd", "sgp", "eagersgd"),
)
"""As they come, but for LocalSGD: as published, with WAGMA's period."""
RACED_SIZES = ("size=tiny", "size=small")
TARGET, RACE_STEPS, EVAL_EVERY = 0.9, 240, 5
LATER_TARGETS = (0.95, 0.98)
OF_THE_IDEAL = 0.85
AT_LEAST = 0.98
_ONE_TURN_S = 1e6
_SECONDS, _ACCURACIES = "measured after, s", "accuracies"
_LATER = (*(f"s to {target:g}" for target in LATER_TARGETS), "s to the best that all reach")
_AT_ONCE = 3
"""Strategies of a comparison on the way to the target. Those that wait for their turn take a share
of the processors, 7% of two where three of them wait, that the ideal does not know of.
"""


class Processors(Quiet):
    """Notes what each worker's process has taken of the processors."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int], list[tuple[int, float]]] = {}

    def progress(self, label: str, progress: WorkerProgress) -> None:
        if progress.step >= PERIOD:  # kernels are compiled by then
            with suppress(psutil.NoSuchProcess):
                times = psutil.Process(progress.pid).cpu_times()
                seen = self._taken.setdefault((label, progress.rank), [])
                seen[1:] = [(progress.step, times.user + times.system)]

    def ms_per_step(self, label: str) -> float | None:
        """Of a rank, the mean of all; None where they have not told often enough."""
        found = [
            (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
            for (of, _), seen in self._taken.items()
            if of == label and len(seen) > 1 and seen[-1][0] > seen[0][0]
        ]
        return 1e3 * float(np.mean(found)) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One situation. `ranks`: whose steps count."""

    name: str
    cluster: Cluster
    ranks: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Found:
    """What one strategy has shown, by seed. Waits are those of every step of every rank, in
    seconds.
    """

    fractions: list[float | None] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    bytes_per_step: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def fraction(self) -> Estimate:
        return estimate(self.fractions)


def random_stragglers() -> Part:
    link, late = LinkSpec(rate_bit_per_s=1e9), Straggling(workers=2, delay_s=DELAY_S)
    cluster = Cluster(workers=WORKERS, link=link, straggling=(late,), step_s=STEP_S)
    return Part(name="two random workers 50 ms late", cluster=cluster, ranks=tuple(range(WORKERS)))


def slow_worker() -> Part:
    speeds = tuple(0.5 if rank == SLOW_RANK else 1.0 for rank in range(WORKERS))
    cluster = Cluster(
        workers=WORKERS, link=LinkSpec(rate_bit_per_s=1e9), speeds=speeds, step_s=STEP_S
    )
    peers = tuple(rank for rank in range(WORKERS) if rank != SLOW_RANK)
    return Part(name="one worker half as fast, its peers", cluster=cluster, ranks=peers)


def durations(cluster: Cluster, steps: int) -> Durations:
    """What each rank computes, or is late, in each step."""
    assert cluster.step_s is not None
    table = np.tile(cluster.step_s / np.array(cluster.speeds), (steps, 1))
    for step in range(steps):
        for rank, delay_s in cluster.delayed_ranks(step + 1).items():
            table[step, rank] += delay_s
    return table


def rule(spec: str) -> Callable[[Durations], Utilisation]:
    """Who waits for whom under strategy `spec`."""
    name, options = parse_spec(spec)
    period, ranks = int(options.get("period", PERIOD)), range(WORKERS)
    nobody = np.arange(WORKERS)[:, None]
    quorum = max(1, int(float(options.get("quorum", 0.75)) * WORKERS))
    ring = np.array([list(ring_weights(rank, WORKERS)) for rank in ranks])

    def pushed(step: int) -> NDArray[np.intp]:
        return np.array(
            [
                exponential_peers(rank, WORKERS, round_number=step, out_degree=1).sources
                for rank in ranks
            ]
        )

    rules: dict[str, Callable[[Durations], Utilisation]] = {
        "allreduce": lambda table: periodic(table, period=1),
        "localsgd": lambda table: periodic(table, period=period),
        "wagma": lambda table: periodic(table, period=period, quorum=quorum),
        "dpsgd": lambda table: with_neighbours(table, lambda step: ring),
        "sgp": lambda table: with_neighbours(table, pushed),
        "eagersgd": lambda table: on_first_call(table, period=1, quorum=WORKERS // 2),
    }
    if name not in rules or options.get("mode") == "solo":
        return lambda table: with_neighbours(table, lambda step: nobody)
    return rules[name]


def over(used: Utilisation, ranks: Sequence[int]) -> float:
    chosen = list(ranks)
    return float(used.worked_s[chosen].sum() / used.elapsed_s[chosen].sum())


def measure(
    part: Part, size: str, specs: Sequence[str], seeds: Sequence[int], steps: int, keep: Path
) -> dict[str, Found]:
    """Run all strategies with each seed, a few of them at a time, and read their records."""
    found = {spec: Found() for spec in specs}
    for seed in seeds:
        cluster = part.cluster.model_copy(update={"seed": seed})
        for first in range(0, len(specs), TOGETHER):
            chunk = specs[first : first + TOGETHER]
            request = CompareRequest(
                task="digits",
                strategies=chunk,
                settings=(*size.split(":"), "batch_size=4"),
                cluster=cluster,
                seeds=(seed,),
                steps=steps,
                eval_every=steps,
                turn_s=_ONE_TURN_S,
            )
            plan = plan_comparison(request, out=keep / f"seed-{seed}-{first}")
            directory, comparison = watched(plan)
            alone = read_steps(Record(directory / f"runs/alone-seed-{seed}")).settled()
            _tell_ideal(alone, cluster)
            for spec, strategy in zip(chunk, comparison.strategies, strict=True):
                found[spec].failure = found[spec].failure or strategy.failure or ""
                if strategy.failure is None:
                    run = read_steps(Record(directory / strategy.runs[0]))
                    _note(
                        found[spec],
                        spec,
                        part,
                        run.window(num_warm_up(run.num_steps)),
                        alone,
                        cluster,
                    )
    return found


def _tell_ideal(alone: Steps, cluster: Cluster) -> None:
    """How well padded compute keeps to its time, without any exchange."""
    meant_s = durations(cluster, int(alone.step[-1]))[alone.step - 1].T
    excess_s = alone.duration_s - meant_s
    words = f"{meant_s.mean() * 1e3:.1f} ms meant, {alone.duration_s.mean() * 1e3:.1f} ms measured"
    print(
        f"alone: {words}, 99th percentile {np.quantile(excess_s, 0.99) * 1e3:.1f} ms too long",
        file=sys.stderr,
    )


def _note(found: Found, spec: str, part: Part, run: Steps, alone: Steps, cluster: Cluster) -> None:
    ranks = list(part.ranks)
    table = durations(cluster, int(run.step[-1]))[run.step - 1]
    found.fractions.append(float(alone.duration_s[ranks].mean() / run.duration_s[ranks].mean()))
    used = rule(spec)(table)
    found.ceilings.append(over(used, ranks))
    found.best.append(over(_called(spec, table) if spec.startswith("wagma") else used, ranks))
    found.bytes_per_step.append(float(run.bytes_sent[ranks].mean()))
    found.waits_s += run.wait_s[ranks].ravel().tolist()


def _called(spec: str, table: Durations) -> Utilisation:
    _, options = parse_spec(spec)
    quorum = max(1, int(float(options.get("quorum", 0.75)) * WORKERS))
    return on_first_call(table, period=int(options.get("period", PERIOD)), quorum=quorum)


def allowed_bytes(spec: str, model_bytes: int) -> float | None:
    """Of a rank and step, by the paper's groups; None for other strategies than WAGMA."""
    name, options = parse_spec(spec)
    if name != "wagma":
        return None
    period, group = int(options.get("period", PERIOD)), int(options.get("group_size", 4))
    share = ((period - 1) * (group - 1) / group + (WORKERS - 1) / WORKERS) / period
    return 2 * model_bytes * share


def figures(title: str, found: dict[str, Found], model_bytes: int) -> Iterator[Figure]:
    """What the page shows of each strategy; a failed one is said on standard error."""
    for spec, one in found.items():
        if one.failure or not one.fractions:
            print(f"{title}: {spec} failed: {one.failure}", file=sys.stderr)
            continue
        cell = partial(Figure, table=title, case=spec)
        fraction, ceiling = one.fraction, float(np.mean(one.ceilings))
        known = (
            None if fraction.low is None or fraction.high is None else (fraction.low, fraction.high)
        )
        ideal = fraction.median or 0.0
        yield cell(column="of the ideal", value=ideal, interval=known, decimals=3)
        yield cell(column="ceiling", value=ceiling, decimals=3)
        yield cell(column="share of the ceiling", value=ideal / ceiling, decimals=3)
        sent = float(np.mean(one.bytes_per_step)) / model_bytes
        yield cell(column="bytes sent a step, by N", value=sent, decimals=3)
        waits_ms = tuple(map(float, 1e3 * np.quantile(one.waits_s, [0.5, 0.99])))
        yield cell(column="wait: median, 99th percentile, ms", value=waits_ms, decimals=1)


def goals(
    title: str, found: dict[str, Found], model_bytes: int, *, at_least: float | None
) -> Iterator[Ratio]:
    """WAGMA's cases; `at_least` in place of 98% of the ceiling."""
    for spec, one in found.items():
        allowed = allowed_bytes(spec, model_bytes)
        if allowed is None:
            continue
        if one.failure or not one.fractions:
            raise SystemExit(f"{spec} failed: {one.failure}")
        fractions = [fraction or 0.0 for fraction in one.fractions]
        if at_least is not None:
            what, goal, ratio = "fraction of ideal", at_least, estimate(fractions)
        else:
            shares = [
                fraction / ceiling
                for fraction, ceiling in zip(fractions, one.ceilings, strict=True)
            ]
            what, goal, ratio = "share of the ceiling", AT_LEAST, estimate(shares)
        low, high = ratio.low or 0.0, ratio.high or 1.0
        yield Ratio(
            case=f"{title}, {spec}, {what}",
            value=ratio.median or 0.0,
            unit="x",
            goal=f"at least {goal:.2f}",
            holds="undecided" if low < goal < high else low >= goal,
            bound=float(np.mean(one.best) / (np.mean(one.ceilings) if at_least is None else 1.0)),
            interval=(low, high),
        )
        sent = [num_bytes / allowed for num_bytes in one.bytes_per_step]
        yield Ratio(
            case=f"{title}, {spec}, bytes over those allowed",
            value=float(np.mean(sent)),
            unit="x",
            goal="at most 1",
            holds=max(sent) <= 1,
            bound=1.0,
            interval=(min(sent), max(sent)),
        )


def cells(
    specs: Sequence[str], seeds: Sequence[int], steps: int, sizes: Sequence[str], directory: Path
) -> Cells:
    situations: list[tuple[Part, str, float | None, Sequence[str]]] = [
        (random_stragglers(), size, None, specs) for size in sizes
    ]
    slow_ones = [spec for spec in AGAINST_A_SLOW_ONE if spec in specs]
    situations += [(slow_worker(), sizes[0], 0.9, slow_ones)] if slow_ones else []

    def cases(part: Part, size: str, at_least: float | None, those: Sequence[str]) -> Iterator[Row]:
        title = f"{part.name}, {size}"
        keep = directory / title.replace(" ", "-").replace(",", "").replace(":", "-")
        found = measure(part, size, those, seeds, steps, keep)
        model_bytes = 4 * _num_parameters(size)
        yield from figures(title, found, model_bytes)
        yield from goals(title, found, model_bytes, at_least=at_least)

    return {
        f"{part.name}, {size}": partial(cases, part, size, at_least, those)
        for part, size, at_least, those in situations
    }


class Races:
    """The strategies' way to the target, in a cell for each size and seed, and their table."""

    def __init__(
        self, specs: Sequence[str], seeds: int, steps: int, keep: Path, kept: ResultFile | None
    ) -> None:
        self._specs = specs
        self._seeds = range(seeds)
        self._steps = steps
        self._keep = keep
        self._kept = kept
        self._rows: dict[str, list[Figure]] = {}

    def cells(self, sizes: Sequence[str], *, again: bool = False) -> Cells:
        runs = {}
        for size in sizes:
            for seed in self._seeds:
                if again:
                    self._drop(size, seed)
                known = self._known(size, seed)
                missing = [spec for spec in self._specs if spec not in known]
                for first in range(0, len(missing), _AT_ONCE):
                    together = missing[first : first + _AT_ONCE]
                    name = f"{self._name(size, seed)}, {', '.join(together)}"
                    runs[name] = partial(self._run, size, seed, together)
        tables = {f"to the target, {size}": partial(self._table, size) for size in sizes}
        if self._kept is not None and not runs.keys() <= self._kept.cells:
            for table in tables.keys() & self._kept.cells:
                self._kept.replace(table, [], origin(None))  # of fewer runs
        return {**runs, **tables}

    def _known(self, size: str, seed: int) -> Sequence[str]:
        """The strategies that have been measured with this seed."""
        kept = [] if self._kept is None else self._kept.results
        ending = f", seed {seed}"
        cases = [
            each.figure.case
            for each in kept
            if each.figure.table == f"to the target, {size}, all runs"
        ]
        return [case.removesuffix(ending) for case in cases if case.endswith(ending)]

    def _drop(self, size: str, seed: int) -> None:
        """Forget what has been measured with this seed."""
        if self._kept is not None:
            name = self._name(size, seed)
            for cell in self._kept.cells:
                if cell == name or cell.startswith(f"{name}, "):
                    self._kept.replace(cell, [], origin(None))

    def _name(self, size: str, seed: int) -> str:
        return f"to the target, {size}, seed {seed}"

    def _run(self, size: str, seed: int, specs: Sequence[str]) -> Iterator[Row]:
        cluster = random_stragglers().cluster.model_copy(update={"seed": seed})
        request = CompareRequest(
            task="digits",
            strategies=specs,
            settings=(*size.split(":"), "batch_size=4"),
            cluster=cluster,
            seeds=(seed,),
            steps=self._steps,
            eval_every=EVAL_EVERY,
            target=TARGET,
            turn_s=_ONE_TURN_S,
        )
        place = f"{size.replace(':', '-')}-{seed}-{self._specs.index(specs[0])}"
        plan = plan_comparison(request, out=self._keep / place)
        processors = Processors()
        directory, comparison = watched(plan, processors)
        alone = read_steps(Record(directory / f"runs/alone-seed-{seed}")).settled()
        _tell_ideal(alone, cluster)
        rows: list[Figure] = []
        for spec, strategy in zip(specs, comparison.strategies, strict=True):
            if strategy.failure is not None:
                print(f"{size}, seed {seed}: {spec} failed: {strategy.failure}", file=sys.stderr)
                continue
            settled = read_steps(Record(directory / strategy.runs[0])).settled()
            step_s = float(settled.duration_s.mean())
            ideal = float(alone.duration_s.mean()) / step_s
            found = strategy.measures
            evaluations = Record(directory / strategy.runs[0]).evaluations()
            cell = partial(
                Figure, table=f"to the target, {size}, all runs", case=f"{spec}, seed {seed}"
            )
            rows += [
                cell(column="a step, ms", value=1e3 * step_s, decimals=1),
                cell(column="of the ideal", value=ideal, decimals=3),
                cell(column="steps to the target", value=found["steps_to_target"].median),
                cell(column="s to the target", value=found["time_to_target_s"].median, decimals=1),
                cell(column="accuracy", value=found["final_metric"].median, decimals=4),
                cell(
                    column="of a processor, ms",
                    value=processors.ms_per_step(strategy.label),
                    decimals=1,
                ),
                cell(
                    column="of a processor alone, ms",
                    value=processors.ms_per_step(ALONE),
                    decimals=1,
                ),
                cell(column=_SECONDS, value=tuple(each.seconds for each in evaluations)),
                cell(column=_ACCURACIES, value=tuple(each.metric for each in evaluations)),
            ]
        self._rows.setdefault(self._name(size, seed), []).extend(rows)
        yield from rows

    def _table(self, size: str) -> Iterator[Row]:
        title = f"to the target, {size}"
        by_spec = {
            spec: self._by_column(size, spec) | self._later(size, spec) for spec in self._specs
        }
        for spec, columns in by_spec.items():
            for column, values in columns.items():
                found = estimate(values)
                known = None not in (found.low, found.high)
                yield Figure(
                    table=title,
                    case=spec,
                    column=column,
                    value=found.median if None not in values else "not by all seeds",
                    interval=(found.low or 0.0, found.high or 0.0) if known else None,
                    decimals={"of the ideal": 3, "accuracy": 4}.get(column, 1),
                )
        if size != RACED_SIZES[-1] or not by_spec.get("wagma"):
            return
        yield _against(
            f"{title}, wagma, of the ideal", by_spec["wagma"]["of the ideal"], at_least=OF_THE_IDEAL
        )
        slower = by_spec.get(RACERS[2], {})
        for column in ("s to the target", *_LATER):
            ratios = [
                None if mine is None or its is None else mine / its
                for mine, its in zip(
                    by_spec["wagma"].get(column, []), slower.get(column, []), strict=False
                )
            ]
            if ratios and None not in ratios:
                case = f"{title}, s of wagma over those of localsgd"
                case += column.removeprefix("s") if column in _LATER else ""
                yield _against(case, ratios, at_most=1.0)

    def _by_column(self, size: str, spec: str) -> dict[str, list[float | None]]:
        """By column, a value for each seed."""
        found: dict[str, list[float | None]] = {}
        for seed in self._seeds:
            for column, value in self._row(size, spec, seed).items():
                if not isinstance(value, tuple):
                    found.setdefault(column, []).append(value if isinstance(value, float) else None)
        return found

    def _later(self, size: str, spec: str) -> dict[str, list[float | None]]:
        """The same of the seconds to later targets; empty where accuracies were not kept."""
        found: dict[str, list[float | None]] = {}
        for seed in self._seeds:
            rows = {each: self._row(size, each, seed) for each in self._specs}
            if _ACCURACIES not in rows[spec]:
                return {}
            best = min(
                max(accuracies)  # type: ignore[type-var]
                for row in rows.values()
                if isinstance(accuracies := row.get(_ACCURACIES), tuple) and accuracies
            )
            for column, target in zip(_LATER, (*LATER_TARGETS, best), strict=True):
                reached = _reached(rows[spec][_SECONDS], rows[spec][_ACCURACIES], target)
                found.setdefault(column, []).append(reached)
        return found

    def _row(self, size: str, spec: str, seed: int) -> dict[str, Value]:
        """By column, what was measured of a strategy with this seed."""
        title = f"to the target, {size}, all runs"
        kept = [] if self._kept is None else [each.figure for each in self._kept.results]
        found: dict[str, Value] = {}
        for row in (*self._rows.get(self._name(size, seed), []), *kept):
            if row.table == title and row.case == f"{spec}, seed {seed}":
                found.setdefault(row.column, row.value)
        return found


def _reached(seconds: Value, accuracies: Value, target: float | None) -> float | None:
    """When, on a straight line between two measurements."""
    assert isinstance(seconds, tuple)
    assert isinstance(accuracies, tuple)
    known = [(s, a) for s, a in zip(seconds, accuracies, strict=True) if s is not None]
    before = known[:1] + known
    for (begun_s, low), (ended_s, high) in zip(before, known, strict=False):
        if target is not None and low is not None and high is not None and high >= target:
            part = (target - low) / (high - low) if high > low else 1.0
            return begun_s + part * (ended_s - begun_s)
    return None


def _against(
    case: str,
    values: Sequence[float | None],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Ratio:
    """A goal, and whether the values of all seeds meet it."""
    found = estimate(values)
    median, low, high = found.median or 0.0, found.low, found.high
    limit = at_least if at_most is None else at_most
    assert limit is not None
    if low is None or high is None or low < limit < high:
        holds: bool | Literal["undecided"] = "undecided"
    else:
        holds = low >= limit if at_most is None else high <= limit
    return Ratio(
        case=case,
        value=median,
        unit="x",
        goal=f"at {'least' if at_most is None else 'most'} {limit:g}",
        holds=holds,
        bound=1.0 if at_most is None else 0.0,
        interval=(low or median, high or median),
    )


def _num_parameters(size: str) -> int:
    from offbeat_lab.tasks import build_task

    return build_task(
        "digits", dict(setting.split("=") for setting in size.split(":"))
    ).num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, 30 steps, one size: only to see that it runs",
    )
    parser.add_argument(
        "--to-target",
        action="store_true",
        help=f"the time to accuracies from {TARGET}, of {', '.join(RACERS)}",
    )
    parser.add_argument("--strategies", help=f"default: {','.join(STRATEGIES)}")
    parser.add_argument("--sizes", help=f"options of digits; default: {','.join(SIZES)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    asked = parser.parse_args()
    usual = (RACERS, RACED_SIZES, RACE_STEPS) if asked.to_target else (STRATEGIES, SIZES, STEPS)
    asked_specs = asked.strategies.split(",") if asked.strategies else usual[0]
    asked_sizes = asked.sizes.split(",") if asked.sizes else usual[1]
    for asked_spec in asked_specs:
        build_strategy(*parse_spec(asked_spec))  # before an hour is spent on those before it
    with tempfile.TemporaryDirectory() as temporary:
        num_seeds, num_steps = (1, 30) if asked.quick else (asked.seeds, usual[2])
        asked_sizes = asked_sizes[: 1 if asked.quick else None]
        directory = asked.keep or Path(temporary)
        if asked.to_target:
            results = asked.results and ResultFile(asked.results / "stragglers.jsonl")
            races = Races(asked_specs, num_seeds, num_steps, directory, results)
            present(races.cells(asked_sizes, again=asked.again), asked, seeds=num_seeds)
        else:
            found_cells = cells(asked_specs, range(num_seeds), num_steps, asked_sizes, directory)
            present(found_cells, asked, seeds=num_seeds)
