"""What the page says of second-order work: how much of its communication was hidden, who inverted
what for how long, and what was done within a step.

In the chart of a step stands above what a worker did itself; below, when factors, and inverses or
preconditioned gradients, were under way, and in which part of that time the worker stood still.
Times are as recorded, in the few steps in which they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.callbacks.profile import FactorAssignment, Span
from offbeat_lab.factor_work import WAITS, FactorWork, MessageTime, in_force, under_way
from offbeat_lab.report.data import PageContent, RunResults
from offbeat_lab.report.page_sections import Bar, Bars
from offbeat_lab.report.style import NOTHING, SECONDS, SHARE, capital, write

PARTS: Final = {
    "hidden": "hidden behind computing",
    "shared": "while gradients were waited for",
    "exposed": "exposed, with nothing else to wait for",
}

_SEEN: Final = 0.001
"""What is less than this part of the whole is not spoken of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPlacement:
    """Who inverts what.

    Attributes:
        heading: the contestant.
        sentence: how the work was divided.
        columns, rows: of the workers: what each has to invert, and how long it took, as text.
        duties: factor, rows, message, owner, as text.
    """

    heading: str
    sentence: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    duties: Sequence[tuple[str, ...]]


def works(report: PageContent) -> list[tuple[int, str, FactorWork]]:
    """Contestants that did such work, by number and label, each with its first run that says so."""
    return [
        (number, contestant.label, work)
        for number, contestant in enumerate(report.contestants)
        if (work := next((run.work for run in contestant.runs if run.work is not None), None))
        is not None
    ]


def sentences(report: PageContent) -> Iterator[tuple[str, str]]:
    """For each of them: its label, and what its messages and inversions cost."""
    for _, label, work in works(report):
        yield label, sentence_of(work)


def sentence_of(work: FactorWork) -> str:
    """What its messages and inversions cost."""
    said = [
        f"{capital(what)} were under way for {write(time.total_s, SECONDS)} of a step:"
        f" {_said(time)}."
        for what, time in (("factors", work.sums), (_carried(work), work.broadcasts))
        if time is not None
    ]
    if (longest_s := work.longest_inversion_s) is not None:
        slowest = work.slowest
        predicted_s = work.predicted_s(slowest)
        foreseen = "" if predicted_s is None else f"; {write(predicted_s, SECONDS)} were predicted"
        said.append(
            f"Worker {slowest} inverted for longest, {write(longest_s, SECONDS)}{foreseen}."
        )
    return " ".join(said)


def message_bars(report: PageContent) -> Iterator[Bars]:
    """How long messages were under way in a step, and what of it was hidden."""
    for heading, kind in (
        ("Factors under way", "sums"),
        ("Inverses or preconditioned gradients under way", "broadcasts"),
    ):
        times = [(number, label, getattr(work, kind)) for number, label, work in works(report)]
        known = [(number, label, time) for number, label, time in times if time is not None]
        longest_s = max((time.total_s for *_, time in known), default=0.0)
        if not longest_s:
            continue
        yield Bars(
            heading=f"{heading}, seconds of a step",
            bars=[
                Bar(
                    label=label,
                    contestant=number,
                    percent=100 * time.total_s / longest_s,
                    text=f"{write(time.total_s, SECONDS)} of a step",
                    parts=[
                        (
                            part,
                            100 * length_s / (time.total_s or 1.0),
                            f"{part} {write(length_s, SECONDS)}",
                        )
                        for part, length_s in _parts(time)
                    ],
                )
                for number, label, time in known
            ],
        )


def placements(report: PageContent) -> Iterator[FactorPlacement]:
    """The plan of each contestant beside what was measured."""
    for _, label, work in works(report):
        if work.duties:
            predicted = ["Predicted"] if _is_predicted(work) else []
            yield FactorPlacement(
                heading=label,
                sentence=_placed(work),
                columns=["Worker", "Factors of its own", "Of all the work", *predicted, "Measured"],
                rows=list(_rows(work)),
                duties=list(_duties(work)),
            )


def _rows(work: FactorWork) -> Iterator[tuple[str, ...]]:
    whole = sum(map(_operations, work.duties)) or 1
    for rank, invert_s in enumerate(work.invert_s):
        mine = [duty for duty in work.duties if duty.owner in (rank, None)]
        predicted = [write(work.predicted_s(rank), SECONDS)] if _is_predicted(work) else []
        yield (
            f"worker {rank}",
            f"{sum(duty.owner == rank for duty in mine)}",
            write(sum(map(_operations, mine)) / whole, SHARE),
            *predicted,
            write(invert_s, SECONDS),
        )


def _operations(duty: FactorAssignment) -> int:
    """What inverting takes, up to a factor."""
    return duty.rows if duty.matrices == 0 else duty.matrices * duty.rows**3


def _is_predicted(work: FactorWork) -> bool:
    return all(duty.predicted_s is not None for duty in work.duties)


def _placed(work: FactorWork) -> str:
    by_all = sum(duty.owner is None for duty in work.duties)
    owned = len(work.duties) - by_all
    parts = (
        [f"{by_all} of {len(work.duties)} factors are inverted by every worker"] if by_all else []
    )
    if not owned:
        parts = [f"All {by_all} factors are inverted by every worker"]
    if owned:
        what = (
            "sends its layers' preconditioned gradients"
            if _carried(work) != "inverses"
            else "broadcasts the inverses"
        )
        parts.append(f"{owned} {'more ' if by_all else ''}by one worker each, which {what}")
    sentence = f"{', '.join(parts)}."
    sentence += (
        " Predictions add up what factors of these sizes took, one at a time, when the session"
        " began."
        if _is_predicted(work)
        else " This strategy measures no costs, so no seconds were predicted."
    )
    return (
        sentence if by_all else f"{owned} factors are inverted{sentence.removeprefix(str(owned))}"
    )


def _carried(work: FactorWork) -> str:
    """What is broadcast."""
    return next((duty.sends for duty in work.duties if duty.sends is not None), "inverses")


def _duties(work: FactorWork) -> Iterator[tuple[str, ...]]:
    for duty in sorted(
        work.duties, key=lambda duty: (-duty.rows * max(1, duty.matrices), duty.factor)
    ):
        times = f"{duty.matrices} times " if duty.matrices > 1 else ""
        yield (
            duty.factor,
            f"{duty.rows:,}, diagonal" if duty.matrices == 0 else f"{times}{duty.rows:,}",
            NOTHING if duty.message is None else f"{duty.message}",
            "all" if duty.owner is None else f"worker {duty.owner}",
        )


def _parts(time: MessageTime) -> list[tuple[str, float]]:
    return [("hidden", time.hidden_s), ("shared", time.shared_s), ("exposed", time.exposed_s)]


def _said(time: MessageTime) -> str:
    shares = [(part, length_s / time.total_s) for part, length_s in _parts(time) if time.total_s]
    return ", ".join(
        f"{write(share, SHARE)} {PARTS[part]}" for part, share in shares if share >= _SEEN
    )


MAX_SPANS: Final = 6000
"""Of one run, in the page."""

_MOST_STEPS: Final = 12

KINDS: Final = ("factor", "invert", "precondition", "wait")
MESSAGES: Final = tuple(WAITS)

SpanBar = tuple[int, int, int, str]
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
    work: Sequence[SpanBar]
    messages: Sequence[Sequence[SpanBar]]


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
