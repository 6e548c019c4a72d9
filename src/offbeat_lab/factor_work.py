"""What second-order work cost in a run, from its profiles: what of the messages was hidden, and who
inverted for how long.

A message is under way from its launch until it is known to be over. That time is

    exposed   while this rank stood still for just these messages
    shared    while it stood still for something else: gradients, mostly, which it would have waited
    for anyway
    hidden    while it was doing something

Over all that is under way at once, time is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, NamedTuple, TypeAlias

from offbeat.callbacks.profile import FactorAssignment, Span
from offbeat_lab.records import Profiled

Intervals: TypeAlias = list[tuple[float, float]]
"""(began_s, ended_s), ascending and disjoint."""

WAITS: Final[Mapping[str, str]] = {"sum": "wait for factors", "broadcast": "wait for inverses"}
"""What a rank stands still for, by the kind of message."""

_OTHER_WAITS: Final = "wait for gradients"


class UnderWay(NamedTuple):
    """Messages of one kind: seconds, or when."""

    hidden: Intervals
    shared: Intervals
    exposed: Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTime:
    """Seconds of a step in which messages of one kind were under way, mean over ranks and steps
    that had any.
    """

    hidden_s: float
    shared_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.hidden_s + self.shared_s + self.exposed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorWork:
    """A run's second-order work in the steps that were looked at, under the last plan, without the
    first of them.

    Attributes:
        duties: the plan.
        num_steps: how many steps the rest was taken from.
        sums: of factors over ranks; None where they stay with their owners.
        broadcasts: of inverses, or of preconditioned gradients; None where nothing is broadcast.
        factor_s, precondition_s: computing factors, and preconditioning gradients: mean
            over ranks and steps that did.
        invert_s: by rank, inverting: median over the steps with inversions; NaN for one that never
            did.
    """

    duties: Sequence[FactorAssignment]
    num_steps: int
    sums: MessageTime | None
    broadcasts: MessageTime | None
    factor_s: float
    precondition_s: float
    invert_s: Sequence[float]

    def predicted_s(self, rank: int) -> float | None:
        """How long `rank` was expected to invert what it owns and what all ranks invert. None where
        nothing was measured.
        """
        mine = [duty.predicted_s for duty in self.duties if duty.owner in (rank, None)]
        return (
            None
            if not self.duties or any(seconds is None for seconds in mine)
            else math.fsum(s for s in mine if s)
        )

    @property
    def slowest(self) -> int:
        """The rank that inverts for longest."""
        return max(
            range(len(self.invert_s)),
            key=lambda rank: (not math.isnan(self.invert_s[rank]), self.invert_s[rank]),
        )

    @property
    def longest_inversion_s(self) -> float | None:
        """How long that one inverts; None where no worker did."""
        longest_s = self.invert_s[self.slowest]
        return None if math.isnan(longest_s) else longest_s


def factor_work(profiles: Mapping[int, Sequence[Profiled]]) -> FactorWork | None:
    """What `profiles`, by rank, say; None where there are none."""
    by_rank = {rank: in_force(some) for rank, some in profiles.items()}
    steps = [one for some in by_rank.values() for one in some[1:] or some]
    if not steps:
        return None
    inverting = [
        [
            seconds
            for one in by_rank.get(rank, ())[1:] or by_rank.get(rank, ())
            if (seconds := _spent_s(one, "invert"))
        ]
        for rank in range(max(by_rank) + 1)
    ]
    first = by_rank[min(by_rank)]
    return FactorWork(
        duties=next((one.duties for one in first if one.duties), ()),
        num_steps=len(first[1:] or first),
        sums=_message_time(steps, "sum"),
        broadcasts=_message_time(steps, "broadcast"),
        factor_s=_mean_s(steps, "factor"),
        precondition_s=_mean_s(steps, "precondition"),
        invert_s=[median(seconds) if seconds else math.nan for seconds in inverting],
    )


def in_force(profiles: Sequence[Profiled]) -> Sequence[Profiled]:
    """Those under the last plan. The step in which it was adopted comes first, which was still
    under the one before.
    """
    adopted = [number for number, one in enumerate(profiles) if one.duties]
    return profiles[adopted[-1] :] if adopted else profiles


def under_way(spans: Sequence[Span], kind: str) -> UnderWay:
    """When messages of `kind` were under way."""
    whole = _union((span.began_s, span.ended_s) for span in spans if span.kind == kind)
    still = _union((span.began_s, span.ended_s) for span in spans if span.kind == WAITS[kind])
    others = _union(
        (span.began_s, span.ended_s)
        for span in spans
        if span.kind != WAITS[kind] and span.kind in (*WAITS.values(), _OTHER_WAITS)
    )
    rest = _without(whole, still)
    return UnderWay(
        hidden=_without(rest, others),
        shared=_without(rest, _without(rest, others)),
        exposed=_both(whole, still),
    )


def _message_time(profiles: Sequence[Profiled], kind: str) -> MessageTime | None:
    found = [
        under_way(one.spans, kind)
        for one in profiles
        if any(span.kind == kind for span in one.spans)
    ]
    if not found:
        return None
    return MessageTime(
        hidden_s=fmean(_length_s(one.hidden) for one in found),
        shared_s=fmean(_length_s(one.shared) for one in found),
        exposed_s=fmean(_length_s(one.exposed) for one in found),
    )


def _mean_s(profiles: Sequence[Profiled], kind: str) -> float:
    spent_s = [seconds for one in profiles if (seconds := _spent_s(one, kind))]
    return fmean(spent_s) if spent_s else 0.0


def _spent_s(profile: Profiled, kind: str) -> float:
    return math.fsum(span.ended_s - span.began_s for span in profile.spans if span.kind == kind)


def _length_s(intervals: Intervals) -> float:
    return math.fsum(ended_s - began_s for began_s, ended_s in intervals)


def _union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    joined: Intervals = []
    for began_s, ended_s in sorted(intervals):
        if joined and began_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], ended_s)
        elif began_s < ended_s:
            joined.append((began_s, ended_s))
    return joined


def _both(a: Intervals, b: Intervals) -> Intervals:
    return [
        (max(x[0], y[0]), min(x[1], y[1]))
        for x in a
        for y in b
        if max(x[0], y[0]) < min(x[1], y[1])
    ]


def _without(a: Intervals, b: Intervals) -> Intervals:
    left = a
    for began_s, ended_s in b:
        left = [
            part
            for x in left
            for part in ((x[0], min(x[1], began_s)), (max(x[0], ended_s), x[1]))
            if part[0] < part[1]
        ]
    return left
