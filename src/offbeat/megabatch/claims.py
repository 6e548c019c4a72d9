"""Which worker takes which samples, agreed through the store that all share: no master deals them
out, and nobody waits.

A *round* is a list of spans, each of which is to be given out once; all workers know it. Whoever is
free claims the next part of it, by one number in the store:

    given/<round>           samples that were claimed so far, raised atomically by whoever claims

A claim is *claimed*, then *computed* by its worker, which says so when all meet, then *merged* with
its worker's model, and only that is final. What was not merged is the round's spans without the
merged ones: it is found without a word from a worker that died, wherever it died, and is the next
round (`Place.after`). So every sample is merged exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from offbeat.membership.agreement import store_errors

if TYPE_CHECKING:
    from torch.distributed import Store


class Span(NamedTuple):
    """Positions `begin` to `end`, the latter excluded, of an epoch's order."""

    begin: int
    end: int


Spans: TypeAlias = tuple[Span, ...]


def num_positions(spans: Iterable[Span]) -> int:
    return sum(span.end - span.begin for span in spans)


def part_of(spans: Iterable[Span], begin: int, end: int) -> Spans:
    """The positions number `begin` to `end` of those in `spans`, laid end to end.

    >>> part_of([Span(0, 4), Span(10, 20)], 2, 6)
    (Span(begin=2, end=4), Span(begin=10, end=12))
    """
    found, passed = [], 0
    for span in spans:
        length = span.end - span.begin
        first, last = max(begin - passed, 0), min(end - passed, length)
        if first < last:
            found.append(Span(span.begin + first, span.begin + last))
        passed += length
    return tuple(found)


def without(spans: Iterable[Span], taken: Iterable[Span]) -> Spans:
    """What of `spans` lies in none of `taken`.

    >>> without([Span(0, 10)], [Span(6, 12), Span(2, 3)])
    (Span(begin=0, end=2), Span(begin=3, end=6))
    """
    left, by_begin = [], sorted(taken)
    for begin, end in spans:
        for gone in by_begin:
            if gone.end <= begin or gone.begin >= end:
                continue
            if begin < gone.begin:
                left.append(Span(begin, gone.begin))
            begin = max(begin, gone.end)
        if begin < end:
            left.append(Span(begin, end))
    return tuple(left)


@dataclass(frozen=True, slots=True)
class Claim:
    """Samples that one worker has taken.

    Attributes:
        spans: where they stand in the epoch's order; more than one where a round was made of what
            others had left.
    """

    spans: Spans

    @property
    def num_samples(self) -> int:
        return num_positions(self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one worker did in a mega-batch.

    Attributes:
        rank: of the worker.
        claims: that it computed, in order.
        updates: optimizer steps taken with them.
        batch_size: what it was to claim at a time, in samples.
        busy_s: from each claim to the next, without waiting for the others.
        weight: of its model in the merge; they sum to 1. 0.0 before that.
    """

    rank: int
    claims: tuple[Claim, ...]
    updates: int
    batch_size: int
    busy_s: float
    weight: float = 0.0

    @property
    def samples(self) -> int:
        return sum(claim.num_samples for claim in self.claims)

    def plus(self, later: Work) -> Work:
        """This and what the worker did in a later round of the same mega-batch."""
        return replace(
            self,
            claims=self.claims + later.claims,
            updates=self.updates + later.updates,
            busy_s=self.busy_s + later.busy_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A round, and where in the data it stands.

    Attributes:
        epoch: passes over the data completed.
        mega_batch: its number in the epoch.
        round: its number in the log.
        retry: which round of the mega-batch it is; above 0, it gives out again what others have
            left.
        spans: that it gives out.
    """

    epoch: int
    mega_batch: int
    round: int
    retry: int
    spans: Spans

    def after(
        self, merged: Iterable[Claim], whole: Callable[[int, int], Spans], num_mega_batches: int
    ) -> Place:
        """The round after this one, of which the claims `merged` are final.

        Args:
            merged: by whomever.
            whole: the spans of a mega-batch, by epoch and number.
            num_mega_batches: of an epoch.
        """
        left = without(self.spans, [span for claim in merged for span in claim.spans])
        if left:
            return replace(self, round=self.round + 1, retry=self.retry + 1, spans=left)
        ends = self.mega_batch + 1 == num_mega_batches
        epoch, number = (self.epoch + 1, 0) if ends else (self.epoch, self.mega_batch + 1)
        return Place(
            epoch=epoch,
            mega_batch=number,
            round=self.round + 1,
            retry=0,
            spans=whole(epoch, number),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """A round that is over, for all workers alike.

    Attributes:
        place: which.
        works: what each worker did that is in the merge, by rank, ascending.
        ranks: who takes part in the next round, ascending.
    """

    place: Place
    works: tuple[Work, ...]
    ranks: tuple[int, ...]

    @property
    def claims(self) -> Iterator[Claim]:
        return (claim for work in self.works for claim in work.claims)


class ClaimLog:
    """One worker's view of the log. Not for several threads at once. No call waits for another
    worker.

    All calls raise `StoreLostError` when the store is gone. A round's number is deleted when the
    next one begins.

    Args:
        store: which all workers share.
        prefix: of the keys; the same on all workers, of this log alone.
    """

    def __init__(self, store: Store, *, prefix: str = "claims") -> None:
        self._store = store
        self._prefix = prefix
        self._round = -1
        self._spans: Spans = ()
        self._arrived = True

    @property
    def round(self) -> int:
        """Number of the round that is open here; -1 before the first."""
        return self._round

    def open(self, number: int, spans: Sequence[Span], *, sweeps: bool = False) -> None:
        """Begin round `number`, which gives `spans` out; the same on all workers, and above the
        number before.

        `sweeps`: on one worker, which deletes what the round before has left.
        """
        assert number > self._round, f"round {number} after round {self._round}"
        if self._round >= 0 and sweeps:  # nobody claims there any more: all have met since
            with store_errors():
                self._store.delete_key(self._given())
        self._round, self._spans, self._arrived = number, tuple(spans), False

    def claim(self, num_samples: int) -> Claim | None:
        """Take the next `num_samples` of the round, or what is left; None, for good, when nothing
        is.
        """
        if self._arrived:
            return None
        total = num_positions(self._spans)
        with store_errors():
            end = self._store.add(self._given(), num_samples)
        begin, end = end - num_samples, min(end, total)
        self._arrived = begin >= total
        return None if self._arrived else Claim(part_of(self._spans, begin, end))

    def _given(self) -> str:
        return f"{self._prefix}/given/{self._round}"
