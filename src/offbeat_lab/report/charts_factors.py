"""What second-order strategies did within a step: computing factors, inverting, preconditioning,
and messages beside that.

Above, what a worker did itself; below, when factors, and inverses or preconditioned gradients, were
under way, and in which part of that time the worker stood still. Times are as recorded, in the few
steps in which they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.callbacks.profile import Span
from offbeat_lab.factor_work import WAITS, in_force, under_way
from offbeat_lab.report.data import PageContent, RunResults

MAX_SPANS: Final = 6000
"""Of one run, in the page."""

_MOST_STEPS: Final = 12

KINDS: Final = ("factor", "invert", "precondition", "wait")
MESSAGES: Final = tuple(WAITS)

Bar = tuple[int, int, int, str]
"""Number of its kind, beginning and end in microseconds from the window's start, and what was done.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorRow:
    """One worker's step.

    Attributes:
        whole: its beginning and its end, in microseconds from the first worker's beginning.
        work: kinds by their places in `KINDS`.
        messages: for each of `MESSAGES`, kinds by their places in the fields of
            `lab.factor_work.UnderWay`.
    """

    whole: tuple[int, int]
    work: Sequence[Bar]
    messages: Sequence[Sequence[Bar]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorTimeline:
    """One run's steps.

    Attributes:
        contestant, run: numbers, by which the page's filters find it.
        numbers: of the steps.
        steps: for each of them a row for each worker.
        messages: which of `MESSAGES` there are in any of them.
    """

    contestant: int
    run: int
    numbers: Sequence[int]
    steps: Sequence[Sequence[FactorRow]]
    messages: tuple[int, ...]


def factor_timelines(report: PageContent) -> Iterator[FactorTimeline]:
    """Of every run of which some steps were looked at on all workers."""
    for number, contestant in enumerate(report.contestants):
        for position, run in enumerate(contestant.runs):
            timeline = _timeline(number, position, run)
            if timeline is not None:
                yield timeline


def _timeline(contestant: int, position: int, run: RunResults) -> FactorTimeline | None:
    workers = run.steps.num_ranks
    by_rank = [
        {one.step: one.spans for one in in_force(run.profiles.get(rank, ()))}
        for rank in range(workers)
    ]
    done = run.steps.step[run.steps.done.all(axis=0)].tolist()  # a line of the record may be torn
    common = set(by_rank[0]).intersection(*by_rank[1:], done) if by_rank else set()
    numbers: list[int] = []
    left = MAX_SPANS
    for step in sorted(common, reverse=True)[
        :_MOST_STEPS
    ]:  # the last ones: everything has found itself by then
        left -= sum(len(spans[step]) for spans in by_rank)
        if left < 0 and numbers:
            break
        numbers.insert(0, step)
    steps = [
        [_row(run, rank, step, by_rank[rank][step]) for rank in range(workers)] for step in numbers
    ]
    there = [
        place
        for place in range(len(MESSAGES))
        if any(row.messages[place] for rows in steps for row in rows)
    ]
    if not steps:
        return None
    return FactorTimeline(
        contestant=contestant, run=position, numbers=numbers, steps=steps, messages=tuple(there)
    )


def _row(run: RunResults, rank: int, step: int, spans: Sequence[Span]) -> FactorRow:
    column = int(np.searchsorted(run.steps.step, step))
    origin_s = float(np.nanmin(run.steps.began_s[:, column]))

    def at(seconds: float) -> int:
        return round((seconds - origin_s) * 1e6)

    began_s, duration_s = (
        float(run.steps.began_s[rank, column]),
        float(run.steps.duration_s[rank, column]),
    )
    work = [
        (kind, at(span.began_s), at(span.ended_s), span.what)
        for span in sorted(spans, key=lambda span: span.began_s)
        if (kind := _kind(span)) is not None
    ]
    messages = [
        [
            (part, at(begin_s), at(end_s), "")
            for part, intervals in enumerate(under_way(spans, kind))
            for begin_s, end_s in intervals
        ]
        for kind in MESSAGES
    ]
    return FactorRow(whole=(at(began_s), at(began_s + duration_s)), work=work, messages=messages)


def _kind(span: Span) -> int | None:
    if span.kind.startswith("wait"):
        return KINDS.index("wait")
    return KINDS.index(span.kind) if span.kind in KINDS else None
