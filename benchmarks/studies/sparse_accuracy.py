"""What sparse gradients cost in accuracy after equally many samples, and which options win it back.

Task `images` at half its size (`width=16`, `shrink=2`), SGD with momentum 0.9, 32 samples a rank,
a warm-up over 1/16 of the steps and linear decay, all ranks in threads of one process (see
`_paired.py`). Every row has the same learning rate: 0.1, or that of `--lr`. AllReduce is best at
0.0125.

    density 0.01 worse than AllReduce: at most 2 points after 800 steps, 0.5 after 3,000
    density 0.001 worse than AllReduce: at most 1.5 points after 3,000 steps

Each run is kept as soon as it is over, so the benchmark may be stopped at any time and goes on with
`--results`. Without `--images` nothing is measured.

    python benchmarks/studies/sparse_accuracy.py [--images NPZ] [--steps N] [--lr RATE] [--seeds N]
        [--seconds S] [--variants NAMES] [--workers N] [--json] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

import _benchmarks  # noqa: F401
from _measure import Ratio, Row, print_rows
from _paired import Runs, TriedStrategy, add_options, compared, images, keep
from _results import ResultFile

UNION = "gtopk:collective=all_gather:density=0.01"
GLOBAL = "gtopk:collective=global:density=0.01"
SPECS: dict[str, str] = {
    "allreduce": "allreduce",
    "union": f"{UNION}:warmup=none",
    "global": f"{GLOBAL}:warmup=none",
    "union, warm-up auto": UNION,
    "global, warm-up auto": GLOBAL,
    "union, 80 steps at 0.1": f"{UNION}:warmup=0.1x80",
    "global, 80 steps at 0.1": f"{GLOBAL}:warmup=0.1x80",
    "union, 50 steps at 0.1": f"{UNION}:warmup=0.1x50",
    "union, 80 steps at 0.03": f"{UNION}:warmup=0.03x80",
    "union, 80 steps at 1": f"{UNION}:warmup=1.0x80",
    "union, optimizer's momentum": f"{UNION}:momentum_correction=none",
    "union, density 0.2": UNION.replace("0.01", "0.2"),
    "union, density 0.2, float8": f"{UNION.replace('0.01', '0.2')}:codec=float8",
    "union, density 0.05": UNION.replace("0.01", "0.05"),
    "union, density 0.05, float8": f"{UNION.replace('0.01', '0.05')}:codec=float8",
    "union, float8": f"{UNION}:codec=float8",
    "union, density 0.001": UNION.replace("0.01", "0.001"),
    "union, density 0.001, 100 steps at 0.1": f"{UNION.replace('0.01', '0.001')}:warmup=0.1x100",
    "ef21": "ef21:density=0.01",
    "ef21, optimizer's momentum": "ef21:density=0.01:momentum_correction=none",
}
AFFORDABLE = f"{UNION.replace('0.01', '0.07')}:codec=float8:warmup=1.0x100"
"""What density="auto" chooses behind 100 Mbit/s, with its warm-up of everything."""
SPECS |= {
    "density 0.07, 100 steps at 1": AFFORDABLE,
    "density 0.07, 100 steps at 1, then 0.35 and 0.18": f"{AFFORDABLE}+0.35x50+0.18x50",
}
VARIANTS = tuple(TriedStrategy(label=name, spec=spec) for name, spec in SPECS.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, help="ranks; default: %(default)s")
    names = "; ".join(SPECS)
    parser.add_argument("--variants", help=f"names, separated by ';', of: {names}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.images is None:
        print("left out: --images names no data", file=sys.stderr)
        return
    few = 1.5 if asked.steps > 800 else None  # the goal where a thousandth of the entries travel
    among = [
        replace(one, workers=asked.workers, goal=few if "density 0.001" in one.label else None)
        for one in VARIANTS
    ]
    wanted = set(SPECS) if asked.variants is None else set(asked.variants.split(";"))
    if unknown := wanted - set(SPECS):
        raise SystemExit(f"no variants: {'; '.join(sorted(unknown))}; there are {names}")
    chosen = [among[0], *(one for one in among[1:] if one.label in wanted)]
    kept = None if asked.results is None else ResultFile(asked.results / "sparse_accuracy.jsonl")
    name = f"images, {asked.steps} steps" + (
        f", {asked.workers} ranks" if asked.workers != 4 else ""
    )
    name += "" if asked.lr == 0.1 else f", learning rate {asked.lr:g}"
    case = images(asked.images, name=name, lrs=(asked.lr,), steps=asked.steps)
    case = replace(case, goal=2.0 if asked.steps <= 800 else 0.5)
    found = compared(case, chosen, Runs(kept, asked.seconds, again=asked.again), asked.seeds)
    rows: Sequence[Row] = [
        row for label, one in found.items() for row in one.figures(label, among[0].label)
    ]
    keep(kept, name, rows)
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
