"""Which worker takes which samples, agreed through the store that all share: no master deals them out, and nobody waits.

A *round* is a list of spans, each of which is to be given out once; all workers know it. Whoever is free claims the next
part of it, and leaves in the store:

    given/<round>           samples that were claimed so far, raised atomically by whoever claims
    claims/<round>/<rank>   where in the round each claim of that rank begins and ends; a full stop once it found nothing left

A claim is *claimed*, then *computed* once its worker claims again or arrives, then *merged* with its worker's model, and only
that is final. What was not merged is the round's spans without the merged ones: it is found without a word from a worker that
died, wherever it died, and is the next round (`Place.after`). So every sample is merged exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

from offbeat.engine.membership import asking
from offbeat.errors import WireError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class Span(NamedTuple):
    """Positions `begin` to `end`, the latter excluded, of an epoch's order."""

    begin: int
    end: int


Spans: TypeAlias = tuple[Span, ...]

_END = "."

Fate: TypeAlias = Literal["claimed", "computed"]


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
        spans: where they stand in the epoch's order; more than one where a round was made of what others had left.
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
        retry: which round of the mega-batch it is; above 0, it gives out again what others have left.
        spans: that it gives out.
    """

    epoch: int
    mega_batch: int
    round: int
    retry: int
    spans: Spans

    def after(self, merged: Iterable[Claim], whole: Callable[[int, int], Spans], num_mega_batches: int) -> Place:
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
        return Place(epoch=epoch, mega_batch=number, round=self.round + 1, retry=0, spans=whole(epoch, number))


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
    """One worker's view of the log. Not for several threads at once. No call waits for another worker.

    All calls raise `StoreLostError` when the store is gone. A round's entries are deleted when the next one begins.

    Args:
        store: which all workers share.
        rank: of this worker.
        prefix: of the keys; the same on all workers, of this log alone.
    """

    def __init__(self, store: Store, *, rank: int, prefix: str = "claims") -> None:
        self._store = store
        self._rank = rank
        self._prefix = prefix
        self._round = -1
        self._spans: Spans = ()
        self._arrived = True

    @property
    def round(self) -> int:
        """Number of the round that is open here; -1 before the first."""
        return self._round

    def open(self, number: int, spans: Sequence[Span], *, sweeps: bool = False) -> None:
        """Begin round `number`, which gives `spans` out; the same on all workers, and above the number before.

        `sweeps`: on one worker, which deletes what the round before has left.
        """
        assert number > self._round, f"round {number} after round {self._round}"
        if self._round >= 0:  # nobody claims there any more: all have met since
            self._ask(lambda: self._store.delete_key(self._mine()))
            if sweeps:
                self._ask(lambda: self._store.delete_key(self._given()))
        self._round, self._spans, self._arrived = number, tuple(spans), False

    def claim(self, num_samples: int) -> Claim | None:
        """Take the next `num_samples` of the round, or what is left; None, for good, when nothing is."""
        if self._arrived:
            return None
        total = num_positions(self._spans)
        end = self._ask(lambda: self._store.add(self._given(), num_samples))
        begin, end = end - num_samples, min(end, total)
        self._arrived = begin >= total
        entry = _END if self._arrived else f"{begin} {end},"
        self._ask(lambda: self._store.append(self._mine(), entry))  # type: ignore[attr-defined]  # missing in torch's stubs
        return None if self._arrived else Claim(part_of(self._spans, begin, end))

    def claims_of(self, rank: int) -> list[tuple[Claim, Fate]]:
        """What `rank` has claimed in this round, in order, and how far it came with each."""
        key = self._claims(rank)
        raw = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"").decode()
        pairs = [_two_numbers(entry) for entry in raw.removesuffix(_END).split(",") if entry]
        in_hand = None if raw.endswith(_END) else len(pairs) - 1
        return [
            (Claim(part_of(self._spans, *pair)), "claimed" if number == in_hand else "computed")
            for number, pair in enumerate(pairs)
        ]

    def _given(self) -> str:
        return f"{self._prefix}/given/{self._round}"

    def _claims(self, rank: int) -> str:
        return f"{self._prefix}/claims/{self._round}/{rank}"

    def _mine(self) -> str:
        return self._claims(self._rank)

    def _ask(self, call: Callable[[], T]) -> T:
        with asking():
            return call()


def _two_numbers(entry: str) -> tuple[int, int]:
    try:
        begin, end = map(int, entry.split())
    except ValueError as error:
        raise WireError(f"the log of claims is damaged: {entry[:80]!r}, needed are two numbers") from error
    return begin, end
