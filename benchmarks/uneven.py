"""Adaptive SGD on workers of unequal speeds: four of them behind emulated links of 1 Gbit/s, each
rule for batch sizes.

Task `xmc` on the bundled data, batches of 32 on average, merged after each pass over 6,815 samples
and not before (`warmup=0`): 53 batches a worker. Steps are padded to 100 ms, so that four workers
fit on two cores; with `--quotas` they are not, and workers have shares of the CPU. A batch of this
task is computed in about 3 ms of a whole core, which is less than claiming one takes a rank with a
fifth of a core; `--long-steps` takes `charlm` in its place, with 29 ms a batch. A figure is the
samples a second of all workers together from the third mega-batch on, over those of the same
workers exchanging nothing, measured in the same round. Beside it stands the ceiling: the same if
claims and merges took no time, so that only the wait for the last batch is left
(`_ceilings.dispatch`).

    at least 0.95 of the summed speed of the workers
    updates within 5% of each other from the third mega-batch on, and again from the third after
    speeds have changed places
    equal workers: at most 1.02 times the time of LocalSGD, which merges as often
    a merge takes at most 5% of a mega-batch

A goal is AdaptiveSGD's with `rule=proportional`; the other rules are shown beside it. Everything is
printed to standard error, mega-batch by mega-batch.

A race shows what speed is worth: strategies with equal options, each for equally many samples. The
target is 95% of what AllReduce reaches in the end, median over seeds. AllReduce takes part twice:
with equal batches, and with batches in proportion to speeds, known before the race and never
changed, and gradients averaged over samples. `--later` measures racers beside AllReduce alone, and
adds their rows to the table of an earlier race. `--train` and `--test` give other data, such as
Delicious of the Extreme Classification Repository.

An ablation is a race of AdaptiveSGD with one part changed at a time.

`--scaling` trains with one, two and four equal workers, with batches of 32 for each of them, for
equally many samples. The target is 95% of what AllReduce reaches with four, median over seeds.

    python benchmarks/uneven.py [--json] [--quick] [--quotas] [--long-steps] [--races NAME,...]
        [--ablations NAME,...] [--racers NAME;...] [--later NAME;...] [--more-targets SHARE,...]
        [--rate MBIT] [--scaling] [--train FILE --test FILE] [--situations NAME,...]
        [--rules NAME,...] [--seeds N] [--mega-batches N] [--keep DIRECTORY] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from _ceilings import dispatch
from _measure import Ratio, Row, add_output_options, present
from _results import Figure
from links import watched
from offbeat.strategies.adaptive import AdaptiveSGD
from offbeat_lab.analysis import analyse as analyse_records
from offbeat_lab.breakdown import read_steps
from offbeat_lab.cluster import Cluster, LinkSpec, SpeedChange
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.comparison import Comparison
from offbeat_lab.records import MegaBatch, Record
from offbeat_lab.statistics import Estimate, estimate
from offbeat_lab.tasks import build_task

WORKERS = 4
BATCH = 32
STEP_S = 0.1
MEGA_BATCHES = 6
AFTER_A_FLIP = 4
SETTLED = 3
"""The number of the mega-batch from which on batch sizes should have found themselves, counted from
1.
"""
RULES = ("proportional", "published")
SPEEDS: Final[Mapping[str, tuple[float, ...]]] = {
    "equal": (1.0, 1.0, 1.0, 1.0),
    "gap": (1.0, 0.92, 0.84, 0.76),
    "half": (1.0, 1.0, 0.5, 0.5),
    "quarter": (1.0, 1.0, 0.25, 0.25),
    "flip": (1.0, 1.0, 0.5, 0.5),
}
BUNDLED = "bundled"
"""A situation of its own: the task as it is, with its own batch size, as fast as this machine
computes it.
"""
RACERS: Final[Mapping[str, str]] = {
    "AdaptiveSGD": "adaptive:mega_batch=50",
    "AdaptiveSGD, always 5 updates": "adaptive:mega_batch=20:warmup=0",
    "AdaptiveSGD, overlap": "adaptive:mega_batch=50:overlap=true",
    "AdaptiveSGD, always 5 updates, overlap": "adaptive:mega_batch=20:warmup=0:overlap=true",
    "ElasticSGD": "elasticsgd:mega_batch=50",
    "Crossbow": "crossbow",
    "AllReduce": "allreduce",
    "AllReduce, batches by speed": "allreduce:batch_shares={speeds}",
    "AdaptiveSGD, in 8 bits": "adaptive:mega_batch=50:codec=linear8:optimizer_state=local",
}
"""By label."""
_MERGED = "adaptive:mega_batch=50"
ABLATED: Final[Mapping[str, str]] = {
    "as it comes": _MERGED,
    "as published": f"{_MERGED}:rule=published",
    "rates linear in batches": f"{_MERGED}:rate_scaling=linear",
    "state of the optimizer local": f"{_MERGED}:optimizer_state=local",
    "no warm-up": f"{_MERGED}:warmup=0",
    "AllReduce": "allreduce",
}
"""AdaptiveSGD with one part changed."""
BASELINE = "AllReduce"
"""Says what the target is."""
RACES = ("half", "quarter")
SCALING = "scaling"
SCALING_WORKERS = (1, 2, 4)
RACE_STEP_S, RACE_EPOCHS, TARGET = 0.05, 4, 0.95
RATE_MBIT_PER_S = 1000
QUOTA = 0.4
"""Of a core, that a worker of speed 1 gets with `--quotas`: four of them fit on two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What workers of unequal speeds compute.

    Attributes:
        task: by name.
        settings: of it, beside the batch size.
        mega_batch: batches between merges; None: a pass over the data.
    """

    task: str
    settings: tuple[str, ...] = ()
    mega_batch: int | None = None


SHORT_STEPS = Work(task="xmc")
LONG_STEPS = Work(task="charlm", settings=("window=128",), mega_batch=154)
"""A third of a pass: 38 batches a worker."""
_SETTLED = "warmup=0:optimizer_state=local"
"""What runs of a few mega-batches measure is how long ones go on."""
_ONE_TURN_S = 1e6
_NEVER = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one run of one rule has shown.

    Attributes:
        fraction: of the summed speed of the workers alone.
        foretold: the same with free claims and merges.
        spread: of updates, the largest where it should have settled.
        foretold_spread: likewise.
        merge_share: of the time of the mega-batches that count.
        spreads: of updates, of each mega-batch.
        batch_sizes: in the last mega-batch, by rank.
    """

    fraction: float
    foretold: float
    spread: float
    foretold_spread: float
    merge_share: float
    spreads: tuple[float, ...]
    batch_sizes: tuple[int, ...]


def cluster(
    situation: str, num_samples: int, mega_batches: int, *, step_s: float | None, seed: int
) -> Cluster:
    """Four workers of these speeds. In "flip" slow and fast ones change places in the last
    mega-batch but one.
    """
    speeds = SPEEDS.get(situation, SPEEDS["equal"])
    changes: list[SpeedChange] = []
    if situation == "flip":
        assert step_s is not None
        at_s = (mega_batches - 1.5) * num_samples / BATCH * step_s / sum(speeds)
        changes = [
            SpeedChange(at_s=at_s, worker=worker, speed=speed)
            for worker, speed in enumerate(reversed(speeds))
        ]
    link = LinkSpec(rate_bit_per_s=1e9)
    return Cluster(
        workers=WORKERS, link=link, speeds=speeds, changes=tuple(changes), step_s=step_s, seed=seed
    )


def foretell(
    rule: str, where: Cluster, num_samples: int, mega_batches: int
) -> tuple[list[float], list[float]]:
    """Fraction of the summed speed, and spread of updates, of each mega-batch, if nothing but
    computing takes time.
    """
    plan = AdaptiveSGD(rule=rule).plan()  # type: ignore[arg-type]
    by_rule = plan.batch_rule(BATCH)
    assert by_rule is not None
    sizes, clock_s, step_s = (BATCH,) * WORKERS, 0.0, where.step_s or STEP_S
    fractions, spreads = [], []
    for _ in range(mega_batches):
        speeds = [where.speed_at(worker, clock_s) for worker in range(WORKERS)]

        def duration_s(rank: int, samples: int, speeds: Sequence[float] = speeds) -> float:
            return step_s * samples / BATCH / speeds[rank]

        done = dispatch(sizes, num_samples, duration_s)
        fractions.append(num_samples / BATCH * step_s / sum(speeds) / done.duration_s)
        spreads.append(spread(done.updates))
        finely = [
            samples / size / s
            for samples, size, s in zip(done.samples, sizes, done.finished_s, strict=True)
        ]
        sizes = by_rule.resize(
            sizes,
            finely if by_rule.only_ratios_count else done.updates,
            [plan.bounds(BATCH)] * WORKERS,
        )
        clock_s += done.duration_s
    return fractions, spreads


def should_have_settled(situation: str, number: int, mega_batches: int) -> bool:
    """Whether updates should be equal in mega-batch `number`, counted from 1."""
    changed_in = mega_batches - 1
    if situation == "flip":
        return SETTLED <= number < changed_in or number >= changed_in + SETTLED
    return number >= SETTLED


def measure(
    situation: str,
    specs: Mapping[str, str],
    where: Cluster,
    *,
    settings: Sequence[str],
    keep: Path,
    task: str = "xmc",
    epochs: int | None = None,
    steps: int | None = None,
) -> tuple[Mapping[str, Record], Record]:
    """Run all `specs`, by label, one after the other; returns their records and that of the workers
    alone. Nothing is evaluated before the end, since a merge before an evaluation is waited for.
    """
    request = CompareRequest(
        task=task,
        strategies=list(specs.values()),
        settings=settings,
        cluster=where,
        seeds=(where.seed,),
        epochs=epochs,
        steps=steps,
        eval_every=_NEVER,
        turn_s=_ONE_TURN_S,
    )
    plan = plan_comparison(request, out=keep / f"{situation}-{where.seed}")
    directory, comparison = watched(plan)
    for strategy in comparison.strategies:
        if strategy.failure is not None:
            raise SystemExit(f"{strategy.label} failed: {strategy.failure}")
    runs = zip(specs, comparison.strategies, strict=True)
    return {label: Record(directory / c.runs[0]) for label, c in runs}, Record(
        directory / f"runs/alone-seed-{where.seed}"
    )


def analyse(
    situation: str,
    rule: str,
    record: Record,
    alone: Record,
    where: Cluster,
    *,
    num_samples: int,
    mega_batches: int,
) -> Found:
    done = record.mega_batches()
    fractions, spreads = foretell(rule, where, num_samples, len(done))
    counting = [mega_batch for mega_batch in done if mega_batch.number >= SETTLED]
    settled = [
        mega_batch
        for mega_batch in done
        if should_have_settled(situation, mega_batch.number, mega_batches)
    ]
    seconds = sum(mega_batch.duration_s for mega_batch in counting)
    samples = sum(share.samples for mega_batch in counting for share in mega_batch.by_rank)
    speed = read_steps(alone).settled().samples_per_s()
    show(situation, rule, done, speed)
    return Found(
        fraction=samples / seconds / speed,
        foretold=len(counting) / sum(1 / fraction for fraction in fractions[SETTLED - 1 :]),
        spread=max(spread_of(mega_batch) for mega_batch in settled),
        foretold_spread=max(spreads[mega_batch.number - 1] for mega_batch in settled),
        merge_share=sum(mega_batch.merge_s for mega_batch in counting) / seconds,
        spreads=tuple(map(spread_of, done)),
        batch_sizes=tuple(share.batch_size for share in done[-1].by_rank),
    )


def spread(updates: Sequence[float]) -> float:
    """How far workers' updates are apart: (largest - smallest) / mean; 0 where nobody made any."""
    return (max(updates) - min(updates)) * len(updates) / (sum(updates) or 1)


def spread_of(mega_batch: MegaBatch) -> float:
    return spread([share.updates for share in mega_batch.by_rank])


def show(situation: str, rule: str, done: Sequence[MegaBatch], speed: float) -> None:
    table = Table(
        *("", "batch sizes", "updates", "spread", "of summed speed", "idle", "merge"),
        title=f"{situation}, {rule}: {speed:,.0f} samples a second alone",
        title_justify="left",
    )
    for mega_batch in done:
        shares = mega_batch.by_rank
        idle_s = float(np.mean([share.idle_s for share in shares]))
        table.add_row(
            str(mega_batch.number),
            " ".join(str(share.batch_size) for share in shares),
            " ".join(str(share.updates) for share in shares),
            f"{spread_of(mega_batch):.1%}",
            f"{sum(share.samples for share in shares) / mega_batch.duration_s / speed:.3f}",
            f"{idle_s / mega_batch.duration_s:.1%}",
            f"{mega_batch.merge_s / mega_batch.duration_s:.1%}",
        )
    Console(stderr=True, width=140).print(table)


def goal(
    case: str,
    values: Sequence[float],
    bound: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Ratio:
    """The median over seeds; the interval is from the least to the largest."""
    low, high = min(values), max(values)
    limit = at_least if at_least is not None else at_most
    assert limit is not None
    holds: bool | Literal["undecided"] = low >= limit if at_least is not None else high <= limit
    return Ratio(
        case=case,
        value=float(np.median(values)),
        unit="x",
        goal=f"at {'least' if at_least is not None else 'most'} {limit:g}",
        holds="undecided" if low < limit < high else holds,
        bound=bound,
        interval=(low, high),
    )


def cases(
    situation: str,
    rules: Sequence[str],
    seeds: Sequence[int],
    mega_batches: int,
    step_s: float | None,
    keep: Path,
    work: Work,
) -> Iterator[Row]:
    if situation == BUNDLED:
        yield from bundled(seeds, mega_batches, keep)
        return
    settings = [f"batch_size={BATCH}", *work.settings]
    num_batches = work.mega_batch or round(build_task(work.task, {}).num_samples / BATCH)
    num_samples = num_batches * BATCH
    num_merges = mega_batches + (AFTER_A_FLIP if situation == "flip" else 0)
    period = num_samples // (WORKERS * BATCH)
    specs = {rule: f"adaptive:rule={rule}:mega_batch={num_batches}:{_SETTLED}" for rule in rules}
    specs |= (
        {"localsgd": f"localsgd:period={period}:warmup=0:optimizer_state=local"}
        if situation == "equal"
        else {}
    )
    found: dict[str, list[Found]] = {rule: [] for rule in rules}
    overheads = []
    for seed in seeds:
        where = cluster(situation, num_samples, mega_batches, step_s=step_s, seed=seed)
        records, alone = measure(
            situation,
            specs,
            where,
            task=work.task,
            settings=settings,
            keep=keep,
            epochs=None if work.mega_batch else num_merges,
            steps=num_merges * num_samples // (WORKERS * BATCH) if work.mega_batch else None,
        )
        for rule in rules:
            sizes = {"num_samples": num_samples, "mega_batches": mega_batches}
            found[rule].append(analyse(situation, rule, records[rule], alone, where, **sizes))
        if situation == "equal":
            local = read_steps(records["localsgd"]).window((SETTLED - 1) * period).samples_per_s()
            overheads.append(
                local / (found[rules[0]][-1].fraction * read_steps(alone).settled().samples_per_s())
            )
    for rule, those in found.items():
        shares = "" if step_s else " with shares of the CPU"
        title = f"{situation}{shares}{', long steps' if work is LONG_STEPS else ''}, {rule}"
        bound = float(np.mean([one.foretold for one in those]))
        yield goal(
            f"{title}: of the summed speed", [one.fraction for one in those], bound, at_least=0.95
        )
        bound = float(np.mean([one.foretold_spread for one in those]))
        yield goal(
            f"{title}: spread of updates", [one.spread for one in those], bound, at_most=0.05
        )
        yield goal(
            f"{title}: share of merges", [one.merge_share for one in those], 0.0, at_most=0.05
        )
        cell = partial(Figure, table="rules", case=title)
        fraction = float(np.median([one.fraction for one in those]))
        yield cell(column="of the summed speed", value=fraction, decimals=2)
        spreads = tuple(100 * one for one in those[0].spreads)
        yield cell(column="spread of updates, by mega-batch, %", value=spreads, decimals=0)
        yield cell(column="batch sizes in the end", value=those[0].batch_sizes)
    if overheads:
        bound = 1 / float(
            np.mean([one.foretold for one in found[rules[0]]])
        )  # LocalSGD leaves out the tail of an epoch
        yield goal(f"{situation}, {rules[0]}: time of localsgd's", overheads, bound, at_most=1.02)


def bundled(seeds: Sequence[int], mega_batches: int, keep: Path) -> Iterator[Ratio]:
    """How long merges take where nothing is padded and all that is computed is the task. The last
    merge of a run is waited for in any case.
    """
    shares: dict[str, list[float]] = {}
    specs = {
        "adaptive": f"adaptive:{_SETTLED}",
        "adaptive, overlap=false": f"adaptive:{_SETTLED}:overlap=false",
    }
    for seed in seeds:
        where = cluster(BUNDLED, 0, mega_batches, step_s=None, seed=seed)
        records, _ = measure(
            BUNDLED,
            specs,
            where,
            epochs=mega_batches,
            settings=(),
            keep=keep,
        )
        for label in specs:
            done = records[label].mega_batches()[SETTLED - 1 :]
            for title, those in (
                ("share of merges", done),
                ("share of merges, without the last", done[:-1]),
            ):
                share = sum(one.merge_s for one in those) / sum(one.duration_s for one in those)
                shares.setdefault(f"{BUNDLED}, {label}: {title}", []).append(share)
            duration_s = np.mean([one.duration_s for one in done[:-1]])
            print(f"{BUNDLED}, {label}: mega-batches of {duration_s * 1e3:.0f} ms", file=sys.stderr)
    for title, found in shares.items():
        yield goal(title, found, 0.0, at_most=0.05)


def race(
    title: str,
    situation: str,
    racers: Mapping[str, str],
    paths: Mapping[str, str],
    seeds: Sequence[int],
    epochs: int,
    step_s: float,
    keep: Path,
    more_targets: Sequence[float] = (),
    later: Sequence[str] = (),
    rate_mbit_per_s: int = RATE_MBIT_PER_S,
) -> Iterator[Figure]:
    """Steps, seconds and precision of strategies that train side by side.

    Args:
        title: of the table.
        situation: one of `SPEEDS`.
        racers: specs by label.
        paths: settings of the task that name its data.
        seeds: of the runs.
        epochs: passes over the data.
        step_s: what a step is padded to, in seconds.
        keep: directory for the comparisons.
        more_targets: shares of the baseline's precision, beside `TARGET`.
        later: labels; only their rows are yielded, where there are any.
        rate_mbit_per_s: of each worker's link.
    """
    speeds = SPEEDS[situation]
    request = _request(racers, speeds, paths, seeds, epochs, step_s, rate_mbit_per_s)
    directory, comparison = _compared(request, keep / title.replace(", ", "-"))
    if comparison.status != "finished":
        raise SystemExit(f"{title}: the comparison was {comparison.status}")
    places = dict(zip(racers, comparison.strategies, strict=True))
    final = places[BASELINE].measures.get("final_metric", estimate([])).median
    alone = {seed: directory / f"runs/alone-seed-{seed}" for seed in seeds}
    if final is not None:
        with_target = comparison.model_copy(update={"target": TARGET * final})
        comparison = analyse_records(directory, with_target, alone)
    for label, strategy in zip(racers, comparison.strategies, strict=True):
        if strategy.failure is not None:
            print(f"{title}: {label} failed: {strategy.failure}", file=sys.stderr)
            continue
        if later and label not in later:
            continue
        measures = strategy.measures
        cell = partial(Figure, table=title, case=label)
        ideal = measures.get("efficiency", estimate([]))
        steps_to, time_to = measures["steps_to_target"], measures["time_to_target_s"]
        metrics = measures["final_metric"]
        yield cell(column="step, ms", value=_mean(measures["step_s"], 1e3), decimals=1)
        yield cell(column="of the summed speed", value=_mean(ideal), decimals=2)
        yield cell(column="steps to the target", value=_known(steps_to), decimals=0)
        yield cell(column="seconds to the target", value=_known(time_to), decimals=1)
        yield cell(column="precision in the end", value=_known(metrics), decimals=4)
    targets = {} if final is None else {share: share * final for share in more_targets}
    for share, target in targets.items():
        with_target = comparison.model_copy(update={"target": target})
        for label, strategy in zip(
            racers, analyse_records(directory, with_target, alone).strategies, strict=True
        ):
            if strategy.failure is None and (not later or label in later):
                measures = strategy.measures
                cell = partial(Figure, table=title, case=label)
                steps_to, time_to = measures["steps_to_target"], measures["time_to_target_s"]
                yield cell(column=f"steps to {share:.0%}", value=_known(steps_to), decimals=0)
                yield cell(column=f"seconds to {share:.0%}", value=_known(time_to), decimals=1)


def scaling(seeds: Sequence[int], epochs: int, step_s: float, keep: Path) -> Iterator[Figure]:
    """Steps, seconds and precision with a growing number of equal workers.

    Args:
        seeds: of the runs.
        epochs: passes over the data.
        step_s: what a batch is padded to, in seconds.
        keep: directory for the comparisons.
    """
    racers = {label: RACERS[label] for label in ("AdaptiveSGD", BASELINE)}
    found = {
        workers: _compared(
            _request(racers, SPEEDS["equal"][:workers], {}, seeds, epochs, step_s),
            keep / f"{SCALING}-{workers}",
        )
        for workers in SCALING_WORKERS
    }
    best = found[WORKERS][1].strategies[-1].measures.get("final_metric", estimate([])).median
    if best is None:
        raise SystemExit(f"{SCALING}: no run of {BASELINE} with {WORKERS} workers came to its end")
    for place, label in enumerate(racers):
        for workers, (directory, comparison) in found.items():
            with_target = comparison.model_copy(update={"target": TARGET * best})
            strategy = analyse_records(directory, with_target, {}).strategies[place]
            if strategy.failure is not None:
                raise SystemExit(f"{SCALING}, {label}, {workers} workers: {strategy.failure}")
            measures = strategy.measures
            noun = "worker" if workers == 1 else "workers"
            cell = partial(Figure, table=SCALING, case=f"{label}, {workers} {noun}")
            yield cell(column="step, ms", value=_mean(measures["step_s"], 1e3), decimals=1)
            steps_to, time_to = measures["steps_to_target"], measures["time_to_target_s"]
            yield cell(column="steps to the target", value=_known(steps_to), decimals=0)
            yield cell(column="seconds to the target", value=_known(time_to), decimals=1)
            yield cell(
                column="precision in the end", value=_known(measures["final_metric"]), decimals=4
            )


def _request(
    racers: Mapping[str, str],
    speeds: Sequence[float],
    paths: Mapping[str, str],
    seeds: Sequence[int],
    epochs: int,
    step_s: float,
    rate_mbit_per_s: int = RATE_MBIT_PER_S,
) -> CompareRequest:
    steps = build_task("xmc", paths).num_samples * epochs // (len(speeds) * BATCH)
    return CompareRequest(
        task="xmc",
        strategies=[spec.format(speeds="/".join(map(str, speeds))) for spec in racers.values()],
        settings=[*(f"{key}={value}" for key, value in paths.items()), f"batch_size={BATCH}"],
        cluster=Cluster(
            workers=len(speeds),
            link=LinkSpec(rate_bit_per_s=1e6 * rate_mbit_per_s),
            speeds=tuple(speeds),
            step_s=step_s,
        ),
        seeds=tuple(seeds),
        steps=steps,
        eval_every=max(1, steps // 20),
    )


def _compared(request: CompareRequest, directory: Path) -> tuple[Path, Comparison]:
    plan = plan_comparison(request, out=directory)
    return watched(plan)


def _mean(found: Estimate, scale: float = 1.0) -> float | None:
    known = [value for value in found.values if value is not None]
    return scale * float(np.mean(known)) if known else None


def _known(found: Estimate) -> tuple[float | None, ...]:
    return tuple(found.values)


def _cell(situation: str, rules: Sequence[str], *, quotas: bool, long_steps: bool) -> str:
    if situation == BUNDLED:
        return situation
    long = ", long steps" if long_steps else ""
    return f"{situation}: {'with quotas' if quotas else ','.join(rules)}{long}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one race and one rule, short steps: only to see that it runs",
    )
    parser.add_argument(
        "--quotas", action="store_true", help="shares of the CPU in place of padded steps"
    )
    parser.add_argument(
        "--long-steps", action="store_true", help="batches that take ten times as long to compute"
    )
    parser.add_argument(
        "--races", default=",".join(RACES), help="situations, may be empty; default: %(default)s"
    )
    parser.add_argument(
        "--ablations", default="", help="situations in which parts of AdaptiveSGD are changed"
    )
    parser.add_argument(
        "--racers",
        default=";".join(RACERS),
        help=f"separated by ';', {BASELINE} among them; default: %(default)s",
    )
    parser.add_argument(
        "--later",
        default="",
        help=f"racers, separated by ';', whose rows are added to those of an earlier race; beside"
        f" {BASELINE} nobody else runs",
    )
    parser.add_argument(
        "--more-targets",
        default="",
        help=f"of races, beside {TARGET}: shares of {BASELINE}'s precision, as in 0.98,0.99",
    )
    parser.add_argument(
        "--rate",
        type=int,
        default=RATE_MBIT_PER_S,
        help="of links in a race, in Mbit/s; default: %(default)s",
    )
    parser.add_argument(
        "--scaling", action="store_true", help=f"train with {SCALING_WORKERS} equal workers"
    )
    parser.add_argument("--train", help="data of races; default: the bundled ones")
    parser.add_argument("--test", help="data held out; needed with --train")
    parser.add_argument(
        "--data", default="Delicious", help="what to call the data of --train; default: %(default)s"
    )
    parser.add_argument(
        "--situations", default=",".join((*SPEEDS, BUNDLED)), help="default: %(default)s"
    )
    parser.add_argument(
        "--rules",
        default=",".join(RULES),
        help="the goals are the first one's; default: %(default)s",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument(
        "--mega-batches",
        type=int,
        default=MEGA_BATCHES,
        help="of each run, at least 4; default: %(default)s",
    )
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rules = RULES[:1] if asked.quick else tuple(asked.rules.split(","))
        seeds = 1 if asked.quick else asked.seeds
        step_s = 0.01 if asked.quick else None if asked.quotas else STEP_S
        directory = asked.keep or Path(temporary)
        epochs, race_step_s = (1, 0.02) if asked.quick else (RACE_EPOCHS, RACE_STEP_S)
        paths = {} if asked.train is None else {"path": asked.train, "test_path": asked.test}
        on = f"{asked.data}, " if paths else ""
        later = [label for label in asked.later.split(";") if label]
        racers = {
            label: RACERS[label]
            for label in ([*later, BASELINE] if later else asked.racers.split(";"))
        }
        added = "".join(f", {label}" for label in later)
        races = RACES[:1] if asked.quick else tuple(filter(None, asked.races.split(",")))
        ablations = tuple(filter(None, asked.ablations.split(",")))
        on += f"{asked.rate} Mbit/s, " if asked.rate != RATE_MBIT_PER_S else ""
        of_races = {
            f"race: {on}{situation}{added}": (f"race, {on}{situation}", situation, racers)
            for situation in races
        } | {
            f"ablation: {on}{situation}": (f"ablation, {on}{situation}", situation, ABLATED)
            for situation in ablations
        }
        cells: dict[str, Callable[[], Iterable[Row]]] = {
            name: partial(
                race,
                *(title, situation, those, paths, range(seeds), epochs, race_step_s, directory),
                more_targets=[float(one) for one in asked.more_targets.split(",") if one],
                later=later,
                rate_mbit_per_s=asked.rate,
            )
            for name, (title, situation, those) in of_races.items()
        }
        if asked.scaling:
            cells[SCALING] = partial(scaling, range(seeds), epochs, race_step_s, directory)
        work = LONG_STEPS if asked.long_steps else SHORT_STEPS
        shared = (rules, range(seeds), asked.mega_batches, step_s, directory, work)
        situations = ("half",) if asked.quick else filter(None, asked.situations.split(","))
        cells |= {
            _cell(situation, rules, quotas=asked.quotas, long_steps=asked.long_steps): partial(
                cases, situation, *shared
            )
            for situation in situations
        }
        present(cells, asked, seeds=seeds)
