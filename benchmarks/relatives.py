"""What the relatives of the four systems send, how long their steps take behind links, and how
accurate they are.

    bytes and seconds of a step: 25 million parameters, four workers, links of 1 Gbit/s and of 100
    Mbit/s, each strategy by turns with DDP
    the metric after equally many samples, against AllReduce, with a learning rate of its own, as
    `parity.py` has it: at most 0.5 points of accuracy worse, 1% of bits

The bound of a step is what the link alone would allow: the bytes that are sent over its rate.

Each comparison and each run is kept as soon as it is over, so the benchmark may be stopped at any
time and goes on with `--results`. Needs root for network namespaces; without, links are imitated in
user space, and the case says so.

    python benchmarks/relatives.py [--json] [--images NPZ] [--text FILE] [--tasks NAME,...]
        [--strategies NAME,...] [--rates MBIT,...] [--seeds N] [--seconds S] [--results DIR]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

import parity
from _measure import Ratio, Row, figure_of, print_rows
from _paired import Contestant, Result, Runs, add_options, compared, keep, source
from _results import Figure, ResultFile
from links import STEPS
from links import compared as compared_steps
from offbeat_lab.analysis import between

BASELINE: Final = parity.BASELINE
RELATIVES: Final = (
    Contestant(label="in 8 bits", spec="allreduce:codec=linear8"),
    Contestant(label="in 4 bits", spec="allreduce:codec=linear4"),
    Contestant(label="signs", spec="allreduce:codec=sign"),
    Contestant(label="PowerSGD of rank 1", spec="powersgd:rank=1"),
    Contestant(label="PowerSGD of rank 4", spec="powersgd:rank=4"),
    Contestant(label="torch's PowerSGD of rank 1", spec="ddp-powersgd:rank=1:start_step=2"),
    Contestant(label="torch's PowerSGD of rank 4", spec="ddp-powersgd:rank=4:start_step=2"),
    Contestant(label="GTopK at 0.01", spec="gtopk:density=0.01:collective=all_gather"),
    Contestant(
        label="GTopK at 0.01, 4 bits",
        spec="gtopk:density=0.01:collective=all_gather:codec=linear4",
    ),
    Contestant(label="DeMo", spec="demo", slower={"images": 50.0}),
    Contestant(label="DEF-SGD at 1/64", spec="defsgd:ratio=64", slower={"images": 10.0}),
    Contestant(label="SparseLoCo", spec="localsgd:period=20:codec=sparseloco"),
    Contestant(label="SparseLoCo of 4 steps", spec="localsgd:period=4:codec=sparseloco"),
    Contestant(
        label="Streaming DiLoCo",
        spec="localsgd:period=20:outer=diloco:codec=e3m0:exchange=4x2x0.5",
    ),
    Contestant(label="DaSGD", spec="localsgd:period=10:exchange=1x5"),
)
DDP: Final = "ddp"
_TABLE = "steps"


def step_cells(rate_bit_per_s: float, one: Contestant, out: Path) -> Iterator[Figure | Ratio]:
    """A strategy's step, beside DDP's in the same comparison."""
    comparison = compared_steps(rate_bit_per_s, STEPS[rate_bit_per_s], out, labels=(DDP, one.spec))
    measures = {each.label.split(":")[0]: each.measures for each in comparison.contestants}
    rate = f"{rate_bit_per_s / 1e6:g} Mbit/s"
    (mine,) = (found for label, found in measures.items() if label != DDP)
    num_bytes = mine["bytes_per_step"].median
    step_s = mine["step_s"].median
    if num_bytes is None or step_s is None:
        raise SystemExit(f"{one.label} has not trained at {rate}")
    case = f"{one.label}, {rate}"
    yield Figure(table=_TABLE, case=case, column="MB a step", value=num_bytes / 1e6, decimals=3)
    yield Figure(table=_TABLE, case=case, column="seconds a step", value=step_s, decimals=4)
    bound_s = num_bytes * 8 / rate_bit_per_s
    yield Figure(table=_TABLE, case=case, column="on the wire, s", value=bound_s, decimals=4)
    faster = between(comparison, "step_s", DDP, one.spec.split(":")[0])
    if faster is not None and faster.low is not None and faster.high is not None:
        yield Figure(
            table=_TABLE,
            case=case,
            column="times DDP's speed",
            value=faster.ratio,
            interval=(faster.low, faster.high),
            decimals=2,
        )


def steps(
    rates: Sequence[float], chosen: Sequence[Contestant], kept: ResultFile | None, seconds: float
) -> None:
    """Measure the steps that are not kept yet."""
    ends_s = time.monotonic() + seconds
    for rate in rates:
        for one in chosen:
            cell = f"{one.label} at {rate / 1e6:g} Mbit/s"
            if (kept is not None and cell in kept.cells) or time.monotonic() > ends_s:
                continue
            with tempfile.TemporaryDirectory() as directory:
                rows = list(step_cells(rate, one, Path(directory) / "comparison"))
            for row in rows:
                print(f"{row.case}: {row.column if isinstance(row, Figure) else ''} {row.value}")
            if kept is not None:
                kept.replace(cell, [figure_of(row) for row in rows], source())


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text")
    parser.add_argument("--tasks", default="images,text", help="default: %(default)s")
    parser.add_argument("--rates", default="1000,100", help="of links; default: %(default)s")
    parser.add_argument(
        "--strategies",
        default=",".join(one.label for one in RELATIVES if "," not in one.label),
        help="default: all",
    )
    asked = parser.parse_args()
    asked.mnist = None
    torch.set_num_threads(1)
    kept = None if asked.results is None else ResultFile(asked.results / "relatives.jsonl")
    chosen = [
        one
        for one in RELATIVES
        if any(one.label.startswith(name) for name in asked.strategies.split(","))
    ]
    rates = [1e6 * float(rate) for rate in asked.rates.split(",") if rate]
    steps(rates, chosen, kept, asked.seconds)
    runs = Runs(kept, asked.seconds)
    rows: list[Row] = []
    for case in parity.cases_of(asked):
        if case.name not in asked.tasks.split(","):
            continue
        trained = [one for one in chosen if not one.spec.startswith("ddp-")]  # no threads of ours
        found: Mapping[str, Result] = compared(case, [BASELINE, *trained], runs, asked.seeds)
        fresh = [row for label, one in found.items() for row in one.figures(label, BASELINE.label)]
        keep(kept, case.name, fresh)
        rows += fresh
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
