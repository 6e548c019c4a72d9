"""How samples were shared out between merges: what each worker took, what it counted for, and what
was lost at merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat_lab.figures import COUNT, NUMBER, SAMPLES_PER_S, SECONDS, SHARE, Unit, write
from offbeat_lab.records import MegaBatch, Share
from offbeat_lab.report.charts import Axis, LineChart, Series, line, mean_line
from offbeat_lab.report.data import Floats, PageContent, RunResults

MOST_LINES: Final = 8
"""Of more workers than there are colours, the mean is drawn, with a band."""

_SETTLING: Final = 3
"""Mega-batches in which batch sizes find themselves: they are drawn, and left out of what is said.
"""

_OF_WORKERS: Final[Sequence[tuple[str, str, str, Unit, Callable[[Share], float]]]] = (
    (
        "batch",
        "Batch size: it follows a worker's speed",
        "samples in a batch",
        COUNT,
        lambda share: share.batch_size,
    ),
    (
        "updates",
        "Updates between merges: alike where sizes fit",
        "updates",
        COUNT,
        lambda share: share.updates,
    ),
    ("weight", "Weight in the merge", "weight", NUMBER, lambda share: share.weight),
    ("idle", "Idle at the merge: time lost to others", "idle", SECONDS, lambda share: share.idle_s),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """One strategy's.

    Attributes:
        heading: its label.
        sentence: what was reached of what the workers can do, and where the rest is.
        charts: over mega-batches.
        num_lines: how many workers have a line of their own, in the first charts; 0 where they are
            too many.
    """

    heading: str
    sentence: str
    charts: Sequence[LineChart]
    num_lines: int


def dispatches(report: PageContent) -> Iterator[Dispatch]:
    """Of each strategy that shared samples out, its first run."""
    for number, strategy in enumerate(report.strategies):
        run = next((run for run in strategy.runs if run.mega_batches), None)
        if run is not None:
            workers = _num_workers(run)
            yield Dispatch(
                heading=strategy.label,
                sentence=sentence_of(run.mega_batches),
                charts=[*_worker_charts(number, run), _rate_chart(number, run)],
                num_lines=workers if workers <= MOST_LINES else 0,
            )


def own_speeds(mega_batch: MegaBatch) -> float:
    """Samples a second of all workers, each at the speed that it had while it computed."""
    return sum(
        share.samples / share.computing_s for share in mega_batch.by_rank if share.computing_s > 0
    )


def reached(mega_batch: MegaBatch) -> float:
    """Samples a second of all workers together, from merge to merge."""
    return (
        sum(share.samples for share in mega_batch.by_rank) / mega_batch.duration_s
        if mega_batch.duration_s > 0
        else math.nan
    )


def _worker_charts(strategy: int, run: RunResults) -> Iterator[LineChart]:
    numbers = np.array([one.number for one in run.mega_batches], dtype=np.float64)
    for key, heading, title, unit, value in _OF_WORKERS:
        values = _by_worker(run, value)
        yield LineChart(
            key=f"dispatch-{key}-{strategy}",
            heading=heading,
            summary=(
                f"{title} of each worker in each mega-batch. At the end: {_ends(values, unit)}."
            ),
            x=Axis(title="mega-batches", unit=COUNT.scales),
            y=Axis(title=title, unit=unit.scales, zero=True),
            series=_lines(numbers, values),
            apart=True,
        )


def _rate_chart(strategy: int, run: RunResults) -> LineChart:
    numbers = np.array([one.number for one in run.mega_batches], dtype=np.float64)
    rates = np.array(
        [[function(one) for one in run.mega_batches] for function in (reached, own_speeds)]
    )
    names = ("all workers together", "sum of the workers' own speeds")
    return LineChart(
        key=f"dispatch-rate-{strategy}",
        heading="Samples a second, against the sum of the workers' own speeds",
        summary=(
            "Samples a second of all workers together, and the sum of their own speeds."
            f" {sentence_of(run.mega_batches)}"
        ),
        x=Axis(title="mega-batches", unit=COUNT.scales),
        y=Axis(title="samples a second", unit=SAMPLES_PER_S.scales, zero=True),
        series=[
            line(place, name, numbers, rate)
            for place, (name, rate) in enumerate(zip(names, rates, strict=True))
        ],
        apart=True,
        legend=names,
    )


def _num_workers(run: RunResults) -> int:
    """Now, or before it was resumed with fewer."""
    ranks = [share.rank for mega_batch in run.mega_batches for share in mega_batch.by_rank]
    return max(run.steps.num_ranks, 1 + max(ranks))


def _by_worker(run: RunResults, value: Callable[[Share], float]) -> Floats:
    """Shape (workers, mega-batches); NaN where a worker took no part."""
    values: NDArray[np.float64] = np.full((_num_workers(run), len(run.mega_batches)), np.nan)
    for place, mega_batch in enumerate(run.mega_batches):
        for share in mega_batch.by_rank:
            values[share.rank, place] = value(share)
    return values


def _lines(numbers: Floats, values: Floats) -> list[Series]:
    if len(values) > MOST_LINES:
        return [mean_line(numbers, values)]
    return [
        line(worker, f"worker {worker}", numbers, of_worker)
        for worker, of_worker in enumerate(values)
    ]


def _ends(values: Floats, unit: Unit) -> str:
    if len(values) > MOST_LINES:
        return (
            f"{write(float(np.nanmin(values[:, -1])), unit)} to"
            f" {write(float(np.nanmax(values[:, -1])), unit)}"
        )
    return ", ".join(
        f"worker {worker} {write(float(value), unit)}" for worker, value in enumerate(values[:, -1])
    )


def sentence_of(mega_batches: Sequence[MegaBatch]) -> str:
    """Medians over mega-batches, the first ones left out where there are enough."""
    settled = [one for one in mega_batches[_SETTLING:] or mega_batches if one.duration_s > 0]
    if not settled:
        return ""
    share = _median(reached(one) / own_speeds(one) for one in settled if own_speeds(one) > 0)
    idle = _median(fmean(share.idle_s for share in one.by_rank) / one.duration_s for one in settled)
    merging = _median(one.merge_s / one.duration_s for one in settled)
    updates = [[share.updates for share in one.by_rank] for one in settled]
    spread = _median((max(some) - min(some)) / (fmean(some) or 1) for some in updates)
    said = (
        f"Together the workers did {write(share, SHARE)} of the sum of their own speeds. They stood"
        f" idle at merges for {write(idle, SHARE)} of the time, and merging took"
        f" {write(merging, SHARE)}."
    )
    if len(updates[0]) > 1:
        said += (
            " Between merges, the most and the fewest updates of a worker were"
            f" {write(spread, SHARE)} of the mean apart."
        )
    return said


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else math.nan
