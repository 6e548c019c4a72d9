"""What Kronecker factors that travel in fewer bits cost in accuracy: SPD-KFAC on the bundled
digits, two ranks in threads of one process, factors in every step, everything else alike.

    bfloat16 and linear8 worse than float32: at most 0.5 points

Each run is kept as soon as it is over, so the study may be stopped at any time and goes on with
`--results`.

    python benchmarks/studies/factor_bits.py [--json] [--seeds N] [--seconds S] [--results DIR]
"""

from __future__ import annotations

import argparse

import torch

import _benchmarks  # noqa: F401
from _measure import Ratio, print_rows
from _paired import Case, Runs, TriedStrategy, add_options, compared, keep
from _results import ResultFile

CASE = Case(
    name="digits",
    task="digits",
    settings=("batch_size=16", "momentum=0.9", "lr_schedule=linear"),
    lrs=(0.05,),
    steps=100,
    higher_is_better=True,
    goal=0.5,
    unit="points",
)
AMONG = tuple(
    TriedStrategy(
        label=codec,
        spec=f"spdkfac:factor_interval=1:inverse_interval=5:factor_codec={codec}",
        workers=2,
    )
    for codec in ("float32", "bfloat16", "linear8")
)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.set_defaults(seeds=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kept = None if asked.results is None else ResultFile(asked.results / "factor_bits.jsonl")
    found = compared(CASE, AMONG, Runs(kept, asked.seconds, again=asked.again), asked.seeds)
    rows = [row for label, one in found.items() for row in one.figures(label, AMONG[0].label)]
    keep(kept, CASE.name, rows)
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
