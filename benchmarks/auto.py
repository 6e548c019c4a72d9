"""Does `Auto` find the strategy that is done first, and what does finding it cost?

Four workers behind emulated links train with `Auto`, and by turns with each of its candidates.
Steps are padded, so that two cores can stand for four accelerators. In every other situation one
random worker is late in each step. A strategy's step is the mean of those after the first ones; the
worth of a step is that of `Auto`'s table (`benchmarks/studies/steps_to_equal.py`).

A run of 2,000 steps is what is judged, of which only a few hundred are made: what `Auto` spends
until its strategy has taken over was measured, and the steps after it are taken to be like those
that were.

    time to equal quality at most 1.1 times that of the best single strategy
    never more than 1.03 times DDP's
    what measuring takes, beyond the steps meanwhile, at most 1% of the run

    python benchmarks/auto.py [--json] [--sizes SIZE,...] [--links LINK,...] [--results DIR]
        [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from _measure import Cells, Ratio, Row, add_output_options, present
from _results import Figure
from links import Quiet
from offbeat.strategies.choice import CANDIDATES, FIRST_LOOK
from offbeat_lab.breakdown import read_steps
from offbeat_lab.cluster import Cluster, LinkSpec, Straggling
from offbeat_lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat_lab.records import Record

SIZES: Final = ("tiny", "small", "medium")
LINKS: Final = {
    "10 Gbit/s": LinkSpec(rate_bit_per_s=1e10),
    "1 Gbit/s": LinkSpec(rate_bit_per_s=1e9),
    "100 Mbit/s": LinkSpec(rate_bit_per_s=1e8),
    "unlike": LinkSpec(rate_bit_per_s=1e9),
}
SLOW_LINK: Final = LinkSpec(rate_bit_per_s=1e8)
"""Of one worker of four, where links are unlike."""
WORKERS, STEP_S, DELAY_S = 4, 0.06, 0.04
STEPS, OF_A_RUN, SETTLED = 500, 2000, 440
"""Of a run, and of those before a strategy has settled: its warm-up is over by then."""
_ONE_TURN_S = 1e6
SINGLE: Final = ("ddp", *CANDIDATES)
TABLE: Final = "situations"


def cluster_of(link: str, *, late: bool) -> Cluster:
    straggling = (Straggling(workers=1, delay_s=DELAY_S),) if late else ()
    links = {0: SLOW_LINK} if link == "unlike" else {}
    return Cluster(
        workers=WORKERS, link=LINKS[link], links=links, straggling=straggling, step_s=STEP_S
    )


def situation(size: str, link: str, *, late: bool, keep: Path) -> Iterator[Row]:
    name = f"{size}, {link}{', one late' if late else ''}"
    request = CompareRequest(
        task="digits",
        strategies=("auto", *SINGLE),
        settings=(f"size={size}", "batch_size=8"),
        cluster=cluster_of(link, late=late),
        seeds=(0,),
        steps=STEPS,
        eval_every=STEPS,
        turn_s=_ONE_TURN_S,
    )
    plan = plan_comparison(request, out=keep / name.replace(", ", "-").replace(" ", "-"))
    directory, comparison = run_comparison(plan, Quiet(), command="python benchmarks/auto.py")
    took_s, step_s, chosen, measuring_s = {}, {}, "allreduce", 0.0
    for contestant in comparison.contestants:
        if contestant.failure is not None:
            continue
        record = Record(directory / contestant.runs[0])
        durations_s = read_steps(record).step_s()
        step_s[contestant.strategy] = float(np.mean(durations_s[SETTLED:]))
        took_s[contestant.strategy] = float(np.sum(durations_s[:SETTLED]))
        if contestant.strategy == "auto":
            chosen = chosen_in(record)
            # What measuring took lies in the step after which it was done, or in the next one.
            around = durations_s[FIRST_LOOK - 1 : FIRST_LOOK + 2]
            before = float(np.median(durations_s[10 : FIRST_LOOK - 1]))
            measuring_s = float(np.sum(around)) - 3 * before
    left = OF_A_RUN - SETTLED
    worth = {name: CANDIDATES[name].sgd.mean for name in CANDIDATES}
    run_s = {
        each: step_s[each] * OF_A_RUN * worth.get(each, 1.0) for each in SINGLE if each in step_s
    }
    auto_s = took_s["auto"] + step_s["auto"] * left * worth[chosen]
    best = min(run_s, key=lambda each: run_s[each])
    cell = partial(Figure, table=TABLE, case=name)
    yield cell(column="chosen", value=chosen)
    yield cell(column="first", value=best)
    for each in ("auto", *SINGLE):
        if each in step_s:
            yield cell(column=f"{each}, ms", value=1e3 * step_s[each], decimals=0)
    for what, value, limit in (
        (f"over {best}", auto_s / run_s[best], 1.1),
        ("over DDP", auto_s / run_s["ddp"], 1.03),
        ("measuring, of a run", max(0.0, measuring_s) / auto_s, 0.01),
    ):
        yield Ratio(
            case=f"{name}, {what}",
            value=value,
            unit="x",
            goal=f"at most {limit:g}",
            holds=value <= limit,
            bound=1.0 if limit > 1 else 0.0,
            interval=(value, value),
        )


def chosen_in(record: Record) -> str:
    """What was at work at the end."""
    summary = record.summary()
    return summary.decisions[-1].after if summary and summary.decisions else "allreduce"


def cells(sizes: list[str], links: list[str], keep: Path) -> Cells:
    return {
        f"{size}, {link}{', one late' if late else ''}": partial(
            situation, size, link, late=late, keep=keep
        )
        for place, size in enumerate(SIZES)
        for number, link in enumerate(LINKS)
        for late in [(place + number) % 2 == 1]
        if size in sizes and link in links
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--sizes", default=",".join(SIZES), help="default: %(default)s")
    parser.add_argument("--links", default=",".join(LINKS), help="default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.keep or Path(temporary)
        present(cells(asked.sizes.split(","), asked.links.split(","), directory), asked)
