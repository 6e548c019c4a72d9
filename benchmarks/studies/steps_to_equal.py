"""How many steps does a strategy take to what AllReduce reaches, at AllReduce's own learning rate?

`Auto` changes the strategy of a run whose learning rate was chosen for plain gradients. So every
strategy has that rate here, and AllReduce trains for fewer and for more steps besides, with a
schedule of that length. Where its metric, on a straight line over the logarithm of the steps, is
the strategy's, it has taken as many steps as the strategy's are worth.

    python benchmarks/studies/steps_to_equal.py --images NPZ --text FILE [--seeds N] [--seconds S]
        [--results DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import _benchmarks  # noqa: F401
from _paired import Case, Run, Runs, TriedStrategy, add_options, images, keep
from _results import Figure, ResultFile

LENGTHS = (0.7, 1.0, 1.4)
ALLREDUCE = TriedStrategy(label="AllReduce", spec="allreduce")
STRATEGIES = (
    TriedStrategy(
        label="GTopK, what any rank sent", spec="gtopk:density=0.01:collective=all_gather"
    ),
    TriedStrategy(label="GTopK, k of the sum", spec="gtopk:density=0.01:collective=reduce_scatter"),
    TriedStrategy(label="PowerSGD", spec="powersgd"),
    TriedStrategy(label="LocalSGD", spec="localsgd"),
    TriedStrategy(label="LocalSGD, 4 bits", spec="localsgd:codec=linear4:warmup=0"),
    TriedStrategy(label="LocalSGD, 4 bits, growing period", spec="localsgd:codec=linear4"),
    TriedStrategy(
        label="LocalSGD, 4 bits, growing period, states averaged",
        spec="localsgd:codec=linear4:optimizer_state=averaged",
    ),
    # Its ranks are processes, whose averages come beside training.
    TriedStrategy(label="WAGMA", spec="wagma", in_threads=False),
    TriedStrategy(label="WAGMA, 4 bits", spec="wagma:values=e3m0", in_threads=False),
    TriedStrategy(label="WAGMA, every 2nd step", spec="wagma:interval=2", in_threads=False),
    TriedStrategy(label="WAGMA, every 5th step", spec="wagma:interval=5", in_threads=False),
)
TABLE = "steps to equal"


def cases_of(images_path: Path, text: Path) -> Iterator[Case]:
    yield replace(images(images_path, name="images", lrs=(0.05,), steps=800), name="images")
    of_a_text = partial(Case, lrs=(0.0015,), steps=800, higher_is_better=False, goal=1.0, unit="%")
    yield of_a_text(
        name="text",
        task="text",
        settings=(
            *(f"path={text}", "batch_size=8", "window=32"),
            *("optimizer=adamw", "lr_warmup=0.0625", "lr_schedule=cosine"),
        ),
    )
    yield of_a_text(
        name="charlm",
        task="charlm",
        settings=(f"path={text}", "model=transformer", "batch_size=8", "window=32"),
        lrs=(0.012,),
        steps=400,
    )


def metrics(case: Case, strategy: TriedStrategy, runs: Runs, seeds: int) -> list[float | None]:
    return [
        runs.metric(Run(case=case, strategy=strategy, lr=case.lrs[0], seed=seed))
        for seed in range(seeds)
    ]


def worth(case: Case, metric: float, curve: Mapping[int, float]) -> float:
    """After how many steps AllReduce has `metric`, as a multiple of the case's.

    Args:
        case: the task.
        metric: of a strategy.
        curve: AllReduce's, by steps.
    """
    steps, reached = np.log(list(curve)), np.array(list(curve.values()))
    slope, offset = np.polyfit(steps, reached, 1)
    return float(np.exp((metric - offset) / slope) / case.steps)


def rows_of_case(case: Case, runs: Runs, seeds: int) -> Iterator[Figure]:
    by_length: dict[int, list[float | None]] = {}
    for length in LENGTHS:
        steps = round(length * case.steps)
        named = replace(case, steps=steps, name=f"{case.name}, {steps} steps")
        by_length[steps] = metrics(named, ALLREDUCE, runs, seeds)
    named = replace(case, name=f"{case.name}, {case.steps} steps")
    for strategy in STRATEGIES:
        factors = []
        for seed, metric in enumerate(metrics(named, strategy, runs, seeds)):
            curve = {steps: found[seed] for steps, found in by_length.items()}
            if metric is not None and None not in curve.values():
                known = {steps: value for steps, value in curve.items() if value is not None}
                factors.append(1 / worth(case, metric, known))
        if factors:
            spread = float(np.std(factors)) if len(factors) > 1 else 0.0
            yield Figure(
                table=TABLE,
                case=strategy.label,
                column=case.name,
                value=float(np.mean(factors)),
                interval=(min(factors), max(factors)) if spread else None,
                decimals=2,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kept = None if asked.results is None else ResultFile(asked.results / "steps_to_equal.jsonl")
    runs = Runs(kept, asked.seconds, again=asked.again)
    for case in cases_of(asked.images, asked.text):
        found = list(rows_of_case(case, runs, asked.seeds))
        keep(kept, f"{case.name}, {TABLE}", found)
        for row in found:
            print(f"{row.column}, {row.case}: {row.value:.2f} times as many steps")


if __name__ == "__main__":
    main()
