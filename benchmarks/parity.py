"""How accurate each strategy is after equally many samples, against AllReduce, each with a learning
rate of its own (see `_paired.py`).

    worse than AllReduce: at most 0.5 points of accuracy, 1% of bits

Rates are tried with three seeds, those of runs in processes with one: where one seed's run of a
text leaves the first plateau late, the best rate of that seed is not the best one.

Four ranks. Most strategies train in threads of one process. WAGMA, AD-PSGD and AdaptiveSGD, whose
averages depend on who comes first, train in processes, as `offbeat train` runs them, and so does
`gtopk` as it comes, which chooses its density by what its link carries: here 100 Mbit/s.

With `--own-rate` all of them train at the learning rate that the task's script has, which is what
`offbeat run` keeps.

Each run is kept as soon as it is over, so the benchmark may be stopped at any time and goes on with
`--results`. `images`, `text` and `mnist` need `--images`, `--text` and `--mnist`, `charlm` needs
`--text`; what is not given is left out.

    python benchmarks/parity.py [--json] [--images NPZ] [--text FILE] [--mnist NPZ]
        [--tasks NAME,...] [--strategies NAME,...] [--own-rate] [--seeds N] [--seconds S]
        [--results DIR] [--again]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from _measure import Ratio, Row, print_rows
from _paired import Case, Result, Runs, TriedStrategy, add_options, compared, images, keep
from _results import Figure, ResultFile
from offbeat_lab.cluster import Cluster, LinkSpec

TUNED_WITH = (0, 1, 2)
LINK = Cluster(workers=4, link=LinkSpec(rate_bit_per_s=100e6))
STRATEGIES = (
    TriedStrategy(label="AllReduce", spec="allreduce", tuned_with=TUNED_WITH),
    TriedStrategy(
        label="GTopK at 0.01",
        spec="gtopk:density=0.01:collective=all_gather",
        tuned_with=TUNED_WITH,
    ),
    TriedStrategy(label="LocalSGD", spec="localsgd", tuned_with=TUNED_WITH),
    TriedStrategy(label="SPDKFAC", spec="spdkfac", slower={"images": 2.0}, tuned_with=TUNED_WITH),
    TriedStrategy(label="GTopK", spec="gtopk", in_threads=False, cluster=LINK),
    TriedStrategy(label="WAGMA", spec="wagma", in_threads=False),
    TriedStrategy(label="AdaptiveSGD", spec="adaptive", in_threads=False),
    TriedStrategy(label="EF21 at 0.01", spec="ef21:density=0.01", tuned_with=TUNED_WITH),
    TriedStrategy(label="ADPSGD", spec="adpsgd", in_threads=False),
)
BASELINE = STRATEGIES[0]
IN_SHORT = "in short"
IN_README = ("images", "text")
OWN_RATE: Final = {"images": 0.05, "text": 0.003, "charlm": 0.003}
"""Of the tasks' scripts."""


def cases_of(asked: argparse.Namespace) -> Iterator[Case]:
    if asked.images is not None:
        yield images(asked.images, name="images", lrs=(0.05, 0.025, 0.0125), steps=800)
    if asked.text is not None:
        yield Case(
            name="text",
            task="text",
            settings=(
                *(f"path={asked.text}", "batch_size=8", "window=32"),
                *("optimizer=adamw", "lr_warmup=0.0625", "lr_schedule=cosine"),
            ),
            lrs=(0.006, 0.003, 0.0015),
            steps=800,
            higher_is_better=False,
            goal=1.0,
            unit="%",
        )
        yield Case(
            name="charlm",
            task="charlm",
            settings=(f"path={asked.text}", "model=transformer", "batch_size=8", "window=32"),
            lrs=(0.012, 0.006, 0.003),
            steps=400,
            higher_is_better=False,
            goal=1.0,
            unit="%",
        )
    if asked.mnist is not None:
        yield images(asked.mnist, name="mnist", lrs=(0.05, 0.025, 0.0125), steps=400)
    yield Case(
        name="xmc",
        task="xmc",
        settings=("batch_size=32",),
        lrs=(0.2, 0.1, 0.05),
        steps=160,  # three passes over the data
        higher_is_better=True,
        goal=0.5,
        unit="points",
    )


def in_short(found: Mapping[str, Mapping[str, Result]]) -> Iterator[Figure]:
    """What the README says of each strategy."""
    for one in STRATEGIES[1:]:
        parts = [
            text
            for case, results in found.items()
            if case in ("images", "text")
            and one.label in results
            and (text := _difference(case, results[one.label]))
        ]
        if parts:
            yield Figure(
                table=IN_SHORT, case=one.label, column="difference", value="; ".join(parts)
            )


def _difference(case: str, result: Result) -> str:
    """How much better, with its sign and the half-width of its interval."""
    gaps, unit = result.gaps, result.case.unit
    known = [-gap for gap in gaps.values if gap is not None]
    if not known:
        return ""
    spread = "" if gaps.low is None or gaps.high is None else f" ± {(gaps.high - gaps.low) / 2:.1f}"
    unit = "%" if unit == "%" else f" {unit}"
    return f"{case} {sum(known) / len(known):+.1f}{spread}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text")
    parser.add_argument("--mnist", type=Path, metavar="NPZ", help="handwritten digits")
    parser.add_argument(
        "--tasks", default="images,text,charlm,mnist,xmc", help="default: %(default)s"
    )
    parser.add_argument(
        "--strategies",
        default=",".join(one.label for one in STRATEGIES),
        help="beside AllReduce; default: %(default)s",
    )
    parser.add_argument(
        "--own-rate", action="store_true", help="train with the learning rate of the task's script"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wanted = asked.strategies.split(",")
    if unknown := set(wanted) - {one.label for one in STRATEGIES}:
        raise SystemExit(f"no strategies: {', '.join(sorted(unknown))}")
    kept = None if asked.results is None else ResultFile(asked.results / "parity.jsonl")
    runs = Runs(kept, asked.seconds, again=asked.again)
    found: dict[str, Mapping[str, Result]] = {}
    rows: list[Row] = []
    tasks = set(asked.tasks.split(","))
    if asked.own_rate:
        tasks &= OWN_RATE.keys()
    for case in cases_of(asked):
        if case.name not in tasks:
            continue
        chosen = [one for one in STRATEGIES if one is BASELINE or one.label in wanted]
        if asked.own_rate:
            case = replace(case, name=f"{case.name}, own rate", lrs=(OWN_RATE[case.name],))
            chosen = [replace(one, slower={}) for one in chosen]
        found[case.name] = compared(case, chosen, runs, asked.seeds)
        fresh = [
            row
            for label, one in found[case.name].items()
            for row in one.figures(label, BASELINE.label)
        ]
        keep(kept, case.name, fresh)
        rows += fresh
    if not asked.own_rate:
        keep(kept, IN_SHORT, list(in_short(found)))
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
