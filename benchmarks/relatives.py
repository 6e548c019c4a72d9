"""What the relatives of the four systems send, how long their steps take behind links, and how
accurate they are.

    bytes and seconds of a step: 25 million parameters, four workers, links of 1 Gbit/s and of 100
    Mbit/s, each strategy by turns with DDP
    the metric after equally many samples, against AllReduce, with a learning rate of its own, as
    `parity.py` has it: at most 0.5 points of accuracy worse, 1% of bits

The bound of a step is what the link alone would allow: the bytes that are sent over its rate.

With `--goals` one figure each is measured, and no steps or metrics:

    bytes         of SparseLoCo a sample, at most 1/100 of DDP's
    hidden        of the time that Streaming DiLoCo's bytes take at 100 Mbit/s, at least 0.9
    wagma         in 4 bits, a model of 4 MB, 1 Gbit/s, two of eight workers late: at least 0.9 of
                  the ideal
    dear          as planned at 10 Gbit/s, DDP's seconds a step over DeAR's: at least 1
    death         longest stall of a worker whose peer was killed, LocalSGD among members: at most
                  one period
    to-metric     seconds until AllReduce's last metric is reached, behind 100 Mbit/s, at the
                  learning rate that the metrics were measured with

Each comparison and each run is kept as soon as it is over, so the benchmark may be stopped at any
time and goes on with `--results`. Needs root for network namespaces; without, links are imitated in
user space, and the case says so.

    python benchmarks/relatives.py [--json] [--images NPZ] [--text FILE] [--tasks NAME,...]
        [--strategies NAME,...] [--rates MBIT,...] [--goals NAME,...] [--seeds N] [--seconds S]
        [--results DIR] [--again]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

import deaths
import parity
import stragglers
from _measure import Ratio, Row, figure_of, print_rows
from _paired import (
    LAST,
    Case,
    Result,
    Run,
    Runs,
    TriedStrategy,
    add_options,
    compared,
    keep,
    source,
    tuned,
)
from _results import Figure, ResultFile
from links import STEPS
from links import compared as compared_steps
from offbeat_lab.cluster import from_flags
from offbeat_lab.comparison import Comparison, Measure
from offbeat_lab.plan.predictions import predict_step
from offbeat_lab.plan.shipped import shipped_profile
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.records import Record
from offbeat_lab.statistics import Estimate
from offbeat_lab.train import train

BASELINE: Final = parity.BASELINE
SLOW, FAST = 100e6, 1e9
SPARSELOCO: Final = "localsgd:period=20:codec=sparseloco"
STREAMING: Final = "localsgd:period=20:outer=diloco:codec=e3m0:exchange=4x2x0.5"
HIDING: Final = "localsgd:period=40:outer=diloco:codec=e3m0:exchange=4x9x0.5"
"""Behind a slow link the largest fragment travels for nine steps."""
AMONG_MEMBERS, PERIOD = "localsgd:period=10:warmup=0:exchange=members", 10
RELATIVES: Final = (
    TriedStrategy(label="in 8 bits", spec="allreduce:codec=linear8"),
    TriedStrategy(label="in 4 bits", spec="allreduce:codec=linear4"),
    TriedStrategy(label="signs", spec="allreduce:codec=sign", slower={"text": 4.0}),
    TriedStrategy(label="PowerSGD of rank 1", spec="powersgd:rank=1"),
    TriedStrategy(label="PowerSGD of rank 4", spec="powersgd:rank=4"),
    TriedStrategy(label="torch's PowerSGD of rank 1", spec="ddp-powersgd:rank=1:start_step=2"),
    TriedStrategy(label="torch's PowerSGD of rank 4", spec="ddp-powersgd:rank=4:start_step=2"),
    TriedStrategy(label="GTopK at 0.01", spec="gtopk:density=0.01:collective=all_gather"),
    TriedStrategy(
        label="GTopK at 0.01, 4 bits",
        spec="gtopk:density=0.01:collective=all_gather:codec=linear4",
    ),
    TriedStrategy(label="DeMo", spec="demo", slower={"images": 50.0, "text": 0.25}),
    TriedStrategy(
        label="DEF-SGD at 1/64", spec="defsgd:ratio=64", slower={"images": 2.0, "text": 0.25}
    ),
    TriedStrategy(
        label="DEF-SGD at 1/64 by itself", spec="defsgd:ratio=64:ahead=1", slower={"images": 2.0}
    ),
    TriedStrategy(label="DeAR", spec="dear"),
    TriedStrategy(label="SparseLoCo", spec=SPARSELOCO),
    TriedStrategy(label="SparseLoCo of 4 steps", spec="localsgd:period=4:codec=sparseloco"),
    TriedStrategy(label="Streaming DiLoCo", spec=STREAMING),
    TriedStrategy(label="DaSGD", spec="localsgd:period=10:exchange=1x5"),
)
OF_ADAM: Final = (
    TriedStrategy(label="1-bit Adam", spec="onebitadam:freeze_step=200"),
    TriedStrategy(label="0/1 Adam", spec="zerooneadam"),
)
"""These train with Adam, so the text alone."""
DDP: Final = "ddp"
_TABLE = "steps"
STEPS_OF_AVERAGES: Final = 80
"""Four of the longest periods, of which the first is left out."""


def step_cells(rate_bit_per_s: float, one: TriedStrategy, out: Path) -> Iterator[Figure | Ratio]:
    """A strategy's step, beside DDP's. Where weights are averaged, so many steps that it has whole
    periods, which would take DDP too long.
    """
    dense = (DDP,) if one.spec.startswith("localsgd") else (DDP, one.spec)
    num_steps = STEPS[rate_bit_per_s]
    measures = measures_of(compared_steps(rate_bit_per_s, num_steps, out / "dense", labels=dense))
    if one.spec not in dense:
        averages = compared_steps(
            rate_bit_per_s, STEPS_OF_AVERAGES, out / "averages", labels=(one.spec,)
        )
        measures |= measures_of(averages)
    (mine,) = (found for label, found in measures.items() if label != DDP)
    rate = f"{rate_bit_per_s / 1e6:g} Mbit/s"
    num_bytes = mine["bytes_per_step"].median
    ddp_s, step_s = measures[DDP]["step_s"], mine["step_s"]
    if num_bytes is None or ddp_s.median is None or step_s.median is None:
        raise SystemExit(f"{one.label} has not trained at {rate}")
    case = f"{one.label}, {rate}"
    yield Figure(table=_TABLE, case=case, column="MB a step", value=num_bytes / 1e6, decimals=3)
    yield Figure(table=_TABLE, case=case, column="seconds a step", value=step_s.median, decimals=4)
    bound_s = num_bytes * 8 / rate_bit_per_s
    yield Figure(table=_TABLE, case=case, column="on the wire, s", value=bound_s, decimals=4)
    yield Figure(
        table=_TABLE,
        case=case,
        column="times DDP's speed",
        value=ddp_s.median / step_s.median,
        interval=(
            (ddp_s.low or ddp_s.median) / (step_s.high or step_s.median),
            (ddp_s.high or ddp_s.median) / (step_s.low or step_s.median),
        ),
        decimals=2,
    )


def measures_of(comparison: Comparison) -> dict[str, Mapping[Measure, Estimate]]:
    """By strategy's name."""
    return {each.label.split(":")[0]: each.measures for each in comparison.strategies}


def steps(asked: argparse.Namespace, kept: ResultFile | None) -> None:
    """Measure the steps that are not kept yet."""
    ends_s = time.monotonic() + asked.seconds
    for rate in (1e6 * float(rate) for rate in asked.rates.split(",") if rate):
        for one in asked.chosen:
            cell = f"{one.label} at {rate / 1e6:g} Mbit/s"
            is_kept = kept is not None and cell in kept.cells and not asked.again
            if is_kept or time.monotonic() > ends_s:
                continue
            with tempfile.TemporaryDirectory() as directory:
                rows = list(step_cells(rate, one, Path(directory) / "comparison"))
            for row in rows:
                print(f"{row.case}: {row.column if isinstance(row, Figure) else ''} {row.value}")
            if kept is not None:
                kept.replace(cell, [figure_of(row) for row in rows], source())


def bytes_a_sample(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """Over two periods. Batches are alike, so bytes a step are bytes a sample."""
    found = compared_steps(FAST, 40, directory, labels=(DDP, SPARSELOCO))
    num_bytes = {one.label: one.measures["bytes_per_step"] for one in found.strategies}
    share = (num_bytes["localsgd"].median or 0.0) / (num_bytes[DDP].median or 1.0)
    yield _goal("SparseLoCo's bytes a sample over DDP's", share, at_most=0.01)


def hidden_share(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """What of the time on the wire a step does not take longer than one without an exchange, in
    which nothing is coded either; and than its own on a faster link, where it codes as much.
    """
    found = {}
    for rate in (FAST, SLOW):
        out = directory / f"{rate:g}"
        (found[rate],) = compared_steps(rate, 80, out, labels=(HIDING,)).strategies  # two periods

    def median(rate: float, measure: Measure) -> float:
        value = found[rate].measures[measure].median
        if value is None:
            raise SystemExit("Streaming DiLoCo has not trained")
        return value

    step_s, num_bits = median(SLOW, "step_s"), 8 * median(SLOW, "bytes_per_step")
    hidden = 1 - step_s * (1 - median(SLOW, "efficiency")) / (num_bits / SLOW)
    case = "Streaming DiLoCo, 100 Mbit/s: hidden of the wire's time"
    yield _goal(case, hidden, at_least=0.9)
    longer_s, slower_s = step_s - median(FAST, "step_s"), num_bits / SLOW - num_bits / FAST
    yield _goal(f"{case}, against its step at 1 Gbit/s", 1 - longer_s / slower_s)


def wagma_of_the_ideal(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    specs = ("wagma:values=e3m0", "wagma")
    part, seeds = stragglers.random_stragglers(), range(asked.seeds)
    found = stragglers.measure(part, "size=small", specs, seeds, stragglers.STEPS, directory)
    for spec, one in found.items():
        fraction = one.fraction
        if one.failure or fraction.median is None:
            raise SystemExit(f"{spec} failed: {one.failure}")
        case = f"{spec}, 4 MB, 1 Gbit/s: of the ideal"
        at_least = 0.9 if spec != "wagma" else None
        low, high = fraction.low or fraction.median, fraction.high or fraction.median
        yield _goal(case, fraction.median, at_least=at_least, interval=(low, high))


def dear_over_ddp(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """As planned: network namespaces carry less than 10 Gbit/s."""
    for rate in ("1gbit", "10gbit", "25gbit"):
        cluster = from_flags(workers=4, link=rate)
        where = Setting(profile=shipped_profile("resnet50"), cluster=cluster)
        planned = predict_step(DDP, where).step_s / predict_step("dear", where).step_s
        at_least = 1.0 if rate == "10gbit" else None
        case = f"DDP over DeAR, ResNet-50 at {rate}, seconds a step as planned"
        yield _goal(case, planned, at_least=at_least)


def stall_after_a_death(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    scenario, seeds = deaths.SCENARIOS["kill-1"], range(asked.seeds)
    found = deaths.measure(AMONG_MEMBERS, scenario, seeds, deaths.STEPS, directory)
    if found.failures or not found.stalls_s:
        raise SystemExit(f"a run failed: {'; '.join(found.failures)}")
    case = "LocalSGD among members, one of 8 killed: longest stall over a period"
    period_s = PERIOD * deaths.STEP_S
    yield _goal(case, max(found.stalls_s) / period_s, at_most=1.0)


def rates_in_race(
    case: Case, strategies: Iterable[TriedStrategy], runs: Runs
) -> Iterator[tuple[TriedStrategy, float]]:
    """Those whose trials are kept, with the learning rates of the table of metrics."""
    for one in strategies:
        lr = tuned(case, one, runs)
        if lr is not None:
            yield one, lr


def seconds_to_metric(asked: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """With seed 0, whose runs at equal samples are kept; of those that come so far."""
    kept = None if asked.results is None else ResultFile(asked.results / "relatives.jsonl")
    runs = Runs(kept, 0.0)  # which makes none
    chosen = [one for one in asked.chosen if not one.spec.startswith("ddp-")]
    for case in parity.cases_of(asked):
        if case.name not in asked.tasks.split(","):
            continue
        target: float | None = None
        for one, lr in rates_in_race(case, (BASELINE, *chosen), runs):
            processes = replace(one, in_threads=False, cluster=parity.LINK)
            planned = Run(case=case, strategy=processes, lr=lr, seed=0).plan()
            record = directory / f"{case.name} {one.label}".replace("/", " of ")
            train(replace(planned, out=record), lambda progress: None)
            seen = Record(record).evaluations()
            if target is None:  # which is AllReduce's
                target = float(np.mean([each.metric for each in seen[-LAST:]]))
            sign = 1 if case.higher_is_better else -1
            reached = (each.seconds for each in seen if sign * (each.metric - target) >= 0)
            if (seconds := next(reached, None)) is not None:
                table = f"seconds to AllReduce's metric, {case.name}"
                yield Figure(
                    table=table, case=one.label, column="seconds", value=seconds, decimals=1
                )


GOALS: Final[Mapping[str, Callable[[argparse.Namespace, Path], Iterator[Row]]]] = {
    "bytes": bytes_a_sample,
    "hidden": hidden_share,
    "wagma": wagma_of_the_ideal,
    "dear": dear_over_ddp,
    "death": stall_after_a_death,
    "to-metric": seconds_to_metric,
}


def _goal(
    case: str,
    value: float,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    interval: tuple[float, float] | None = None,
) -> Row:
    """Without a limit a figure that has no goal."""
    low, high = interval or (value, value)
    holds: bool | Literal["undecided"]
    if at_most is not None:
        goal, bound = f"at most {at_most:g}", 0.0
        holds = "undecided" if low <= at_most < high else high <= at_most
    elif at_least is not None:
        goal, bound = f"at least {at_least:g}", 1.0
        holds = "undecided" if low < at_least <= high else low >= at_least
    else:
        return Figure(case=case, value=value, unit="x", interval=interval)
    return Ratio(
        case=case, value=value, unit="x", goal=goal, holds=holds, bound=bound, interval=(low, high)
    )


def goals(asked: argparse.Namespace, kept: ResultFile | None) -> None:
    """Measure what is asked for and not kept yet."""
    rows: list[Row] = []
    for name in asked.goals.split(","):
        if kept is not None and name in kept.cells and not asked.again:
            continue
        with tempfile.TemporaryDirectory() as directory:
            found = list(GOALS[name](asked, Path(directory) / "records"))
        keep(kept, name, found)
        rows += found
    for row in rows:
        print(f"{row.case}: {row.value}")


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text")
    parser.add_argument("--tasks", default="images,text", help="default: %(default)s")
    parser.add_argument(
        "--goals", default="", help=f"by commas, of {', '.join(GOALS)}; default: none of them"
    )
    parser.add_argument("--rates", default="1000,100", help="of links; default: %(default)s")
    parser.add_argument(
        "--strategies",
        default=",".join(one.label for one in (*RELATIVES, *OF_ADAM) if "," not in one.label),
        help="default: all",
    )
    asked = parser.parse_args()
    asked.mnist = None
    torch.set_num_threads(1)
    kept = None if asked.results is None else ResultFile(asked.results / "relatives.jsonl")
    names = tuple(asked.strategies.split(","))
    asked.chosen = [one for one in RELATIVES if one.label.startswith(names)]
    of_adam = [one for one in OF_ADAM if one.label.startswith(names)]
    if asked.goals:
        goals(asked, kept)
        return
    steps(asked, kept)
    runs = Runs(kept, asked.seconds, again=asked.again)
    rows: list[Row] = []
    for case in parity.cases_of(asked):
        if case.name not in asked.tasks.split(","):
            continue
        trained = [
            *(one for one in asked.chosen if not one.spec.startswith("ddp-")),  # no threads of ours
            *(of_adam if case.name == "text" else ()),
        ]
        found: Mapping[str, Result] = compared(case, [BASELINE, *trained], runs, asked.seeds)
        fresh = [row for label, one in found.items() for row in one.figures(label, BASELINE.label)]
        keep(kept, case.name, fresh)
        rows += fresh
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
