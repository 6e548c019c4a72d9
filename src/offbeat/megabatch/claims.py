"""Which worker takes which samples, agreed through the store that all workers share: no master
deals them out, and nobody waits for another worker.

A *round* is a list of spans, each of which is to be given out once; all workers know it. A worker
that is free claims the next part of it, by one number in the store:

    given/<round>           samples that were claimed so far, raised atomically by whoever claims
    ended/<round>           how the first worker came to the end of the round, written once; only
                            where workers go on beside a merge, and so must know it alike

A claim is of one batch, or of several where claiming takes long beside computing a batch
(`batches_at_once`), but of no more than a small part of what is left, so that workers end together.

What would be left for a claim of fewer than `smallest` samples belongs to the claim before it. The
worker that claims it and whoever comes later conclude so from the same number.

Workers stop claiming before nothing is left when one is on its way into the run, so that all merge
and it has their model. What nobody has claimed then is the next round. Each worker stops when it
hears of the newcomer, and others may go on until nothing is left: what matters is only what was
computed.

A claim is *claimed*, then *computed* by its worker, which says so when all workers merge, then
*merged* with its worker's model, and only that is final. What was not merged is the round's spans
without the merged ones. It is found without a message from a worker that died, wherever it died,
and it is the next round (`ClaimRound.after`). So every sample is merged exactly once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch.distributed import Store


class SampleRange(NamedTuple):
    """Positions from `begin` up to, not including, `end` in the order of samples."""

    begin: int
    end: int


SampleRanges: TypeAlias = tuple[SampleRange, ...]


def num_positions(spans: Iterable[SampleRange]) -> int:
    return sum(span.end - span.begin for span in spans)


def part_of(spans: Iterable[SampleRange], begin: int, end: int) -> SampleRanges:
    """The positions number `begin` to `end` of those in `spans`, laid end to end.

    >>> part_of([SampleRange(0, 4), SampleRange(10, 20)], 2, 6)
    (SampleRange(begin=2, end=4), SampleRange(begin=10, end=12))
    """
    found, passed = [], 0
    for span in spans:
        length = span.end - span.begin
        first, last = max(begin - passed, 0), min(end - passed, length)
        if first < last:
            found.append(SampleRange(span.begin + first, span.begin + last))
        passed += length
    return tuple(found)


def without(spans: Iterable[SampleRange], taken: Iterable[SampleRange]) -> SampleRanges:
    """What of `spans` lies in none of `taken`.

    >>> without([SampleRange(0, 10)], [SampleRange(6, 12), SampleRange(2, 3)])
    (SampleRange(begin=0, end=2), SampleRange(begin=3, end=6))
    """
    left, by_begin = [], sorted(taken)
    for begin, end in spans:
        for hole in by_begin:
            if hole.end <= begin or hole.begin >= end:
                continue
            if begin < hole.begin:
                left.append(SampleRange(begin, hole.begin))
            begin = max(begin, hole.end)
        if begin < end:
            left.append(SampleRange(begin, end))
    return tuple(left)


def joined(spans: Iterable[SampleRange]) -> SampleRanges:
    """The same positions, ascending, in as few spans as possible.

    >>> joined([SampleRange(6, 9), SampleRange(0, 2), SampleRange(2, 4)])
    (SampleRange(begin=0, end=4), SampleRange(begin=6, end=9))
    """
    found: list[SampleRange] = []
    for span in sorted(spans):
        if found and found[-1].end == span.begin:
            found[-1] = SampleRange(found[-1].begin, span.end)
        else:
            found.append(span)
    return tuple(found)


def end_of_claim(begin: int, size: int, total: int, *, smallest: int) -> int:
    """Where a claim of `size` of `total` positions ends that begins at `begin`. It takes what is
    left behind it too, where that is less than the smallest claim.

    >>> [end_of_claim(begin, 10, 21, smallest=2) for begin in (0, 10)]
    [10, 21]
    """
    end = begin + size
    return end if total - end >= smallest else total


CLAIMING_SHARE: Final = 0.05
"""Of a worker's time, that claims are to take at most."""

SHARE_OF_REST: Final = 0.25
"""Of what is left in a round, that all workers together may claim at once beyond one batch each."""


def batches_at_once(
    *, claim_s: float, batch_s: float, samples_left: int, samples_of_all: int
) -> int:
    """How many batches a worker should claim together: so many that claiming takes a twentieth of
    the time, as long as few workers hold much of what is left.

    Args:
        claim_s: how long a claim takes, in seconds, >= 0.
        batch_s: how long a batch takes to compute, in seconds, >= 0; 0: it is not known yet.
        samples_left: of the round, that nobody had claimed at this worker's last claim.
        samples_of_all: in one batch of each worker, >= 1.

    >>> some = {"samples_left": 8000, "samples_of_all": 128}
    >>> batches_at_once(claim_s=0.001, batch_s=0.1, **some)
    1
    >>> batches_at_once(claim_s=0.001, batch_s=0.006, **some)
    4
    >>> batches_at_once(claim_s=0.001, batch_s=0.0, **some)
    1
    >>> batches_at_once(claim_s=0.1, batch_s=0.1, **some)  # 62 are left for each worker
    15
    """
    if batch_s <= 0:
        return 1
    most = max(1, int(SHARE_OF_REST * samples_left / samples_of_all))
    if claim_s >= most * CLAIMING_SHARE * batch_s:
        return most
    return max(1, math.ceil(claim_s / (CLAIMING_SHARE * batch_s)))


@dataclass(frozen=True, slots=True)
class Claim:
    """Samples that one worker has taken.

    Attributes:
        spans: where they stand in the order of samples; more than one where a round was made of
            what departed workers had claimed.
    """

    spans: SampleRanges

    @property
    def num_samples(self) -> int:
        return num_positions(self.spans)

    def batches(self, size: int, *, smallest: int, largest: int) -> list[Claim]:
        """The claim in batches of `size` samples, but for the last one, which has no fewer than
        `smallest` unless the whole claim has. Where that makes it larger than `largest`, it is
        split.

        >>> claim = Claim((SampleRange(0, 33),))
        >>> [part.num_samples for part in claim.batches(10, smallest=4, largest=20)]
        [10, 10, 13]
        >>> [part.num_samples for part in claim.batches(10, smallest=4, largest=10)]
        [10, 10, 6, 7]
        """
        found: list[Claim] = []
        begin, total = 0, self.num_samples
        while begin < total:
            end = end_of_claim(begin, size, total, smallest=smallest)
            found += Claim(part_of(self.spans, begin, end)).split(largest)
            begin = end
        return found

    def split(self, largest: int) -> Iterator[Claim]:
        """The claim in as few parts, of nearly equal sizes, as have at most `largest` samples.

        >>> [part.num_samples for part in Claim((SampleRange(0, 11),)).split(10)]
        [5, 6]
        """
        total = self.num_samples
        count = -(-total // largest)
        for number in range(count):
            begin, end = total * number // count, total * (number + 1) // count
            yield Claim(part_of(self.spans, begin, end))


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatchShare:
    """What one worker computed of a mega-batch.

    Attributes:
        rank: of the worker.
        claims: that it computed, in order.
        updates: optimizer steps taken with them.
        batch_size: how many samples it was to claim at a time.
        busy_s: time from each claim to the next, without waiting for peers, in seconds.
        is_cut_short: whether the worker stopped claiming, because another one was on its way in.
        weight: of its model in the merge; all weights sum to 1. 0.0 before the merge.
    """

    rank: int
    claims: tuple[Claim, ...]
    updates: int
    batch_size: int
    busy_s: float
    is_cut_short: bool = False
    weight: float = 0.0

    @property
    def samples(self) -> int:
        return sum(claim.num_samples for claim in self.claims)

    @property
    def full_updates(self) -> float:
        """The updates, counted by their samples: one of a claim with half of `batch_size` is half
        an update. It is `updates` where all claims have `batch_size` samples.
        """
        if not self.claims:
            return float(self.updates)
        return self.updates * (self.samples / (len(self.claims) * self.batch_size))

    def plus(self, later: MegaBatchShare) -> MegaBatchShare:
        """This and what the worker computed in a later round of the same mega-batch, whose merge is
        the one that the weight is of.
        """
        return replace(
            self,
            claims=self.claims + later.claims,
            updates=self.updates + later.updates,
            busy_s=self.busy_s + later.busy_s,
            weight=later.weight,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRound:
    """A list of spans to be claimed, and where in the data it stands.

    Attributes:
        epoch: number of completed passes over the data.
        mega_batch: number of the mega-batch in the epoch.
        round: number of the round in the log.
        retry: above 0, it gives out again what was claimed in the round before and not merged.
        spans: that it gives out.
        later: what later rounds of the same mega-batch give out.
    """

    epoch: int
    mega_batch: int
    round: int
    retry: int
    spans: SampleRanges
    later: SampleRanges = ()

    def after(
        self,
        merged: Iterable[Claim],
        whole: Callable[[int, int], SampleRanges],
        num_mega_batches: int,
        *,
        is_cut_short: bool = False,
    ) -> ClaimRound:
        """The round after this one, of which the claims `merged` are final.

        Args:
            merged: by any worker.
            whole: the spans of a mega-batch, by epoch and number.
            num_mega_batches: of an epoch.
            is_cut_short: whether what is left was not given out yet, for the most part.
        """
        left = without(self.spans, [span for claim in merged for span in claim.spans])
        if left:
            retry = self.retry + (not is_cut_short)
            return replace(self, round=self.round + 1, retry=retry, spans=left)
        if self.later:
            return replace(self, round=self.round + 1, retry=0, spans=self.later, later=())
        passes, number = divmod(self.mega_batch + 1, num_mega_batches)
        moved = replace(self, epoch=self.epoch + passes, mega_batch=number, round=self.round + 1)
        return replace(moved, retry=0, spans=whole(moved.epoch, number))

    def cut(self, end: int) -> ClaimRound:
        """The round that gives out only what stands before position `end`, and leaves the rest to
        later rounds.

        >>> whole = ClaimRound(
        ...     epoch=0, mega_batch=0, round=0, retry=0, spans=(SampleRange(0, 10),)
        ... )
        >>> whole.cut(4).spans, whole.cut(4).later
        ((SampleRange(begin=0, end=4),), (SampleRange(begin=4, end=10),))
        """
        first = min((span.begin for span in self.spans), default=end)
        later = without(self.spans, [SampleRange(min(first, end), end)])
        return replace(self, spans=without(self.spans, later), later=(*later, *self.later))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedRound:
    """A round that is over, for all workers alike.

    Attributes:
        claim_round: the round that was merged.
        shares: what each worker computed of it, for the workers in the merge, by rank, ascending.
        ranks: who takes part in the next round, ascending.
        following: the round that is under way since before this one was merged; None: none is.
    """

    claim_round: ClaimRound
    shares: tuple[MegaBatchShare, ...]
    ranks: tuple[int, ...]
    following: ClaimRound | None = None

    @property
    def claims(self) -> Iterator[Claim]:
        return (claim for share in self.shares for claim in share.claims)

    @property
    def left(self) -> SampleRanges:
        """What of the round is in no merged claim."""
        return without(
            self.claim_round.spans, [span for claim in self.claims for span in claim.spans]
        )

    @property
    def is_cut_short(self) -> bool:
        """Whether workers stopped claiming, so that what is left is the rest of the round."""
        return bool(self.left) and any(share.is_cut_short for share in self.shares)

    def next_round(
        self, whole: Callable[[int, int], SampleRanges], num_mega_batches: int
    ) -> ClaimRound:
        """The round that workers go on with; for the arguments see `ClaimRound.after`."""
        return self.following or self.claim_round.after(
            self.claims, whole, num_mega_batches, is_cut_short=self.is_cut_short
        )


class ClaimLog:
    """One worker's view of the log. It may be used by one thread at a time. No call waits for
    another worker.

    All calls raise `StoreLostError` when the store cannot be reached any more. A round's number is
    deleted when the next one begins.

    Args:
        store: which all workers share.
        prefix: of the keys; the same on all workers, of this log alone.

    Attributes:
        round: number of the round that is open here; -1 before the first.
        num_left: samples of the open round that nobody had claimed at this worker's last claim.
    """

    def __init__(self, store: Store, *, prefix: str = "claims") -> None:
        self.round, self.num_left = -1, 0
        self._store = store
        self._prefix = prefix
        self._spans: SampleRanges = ()
        self._smallest = 1
        self._is_exhausted = True
        self._num_of_own: int | None = None  # claimed of a part that is this worker's alone
        self._old: deque[tuple[int, str]] = deque()  # Entries, by round.

    def open(
        self,
        number: int,
        spans: Sequence[SampleRange],
        *,
        share: tuple[int, Sequence[int]] | None = None,
        smallest: int = 1,
        sweeps: bool = False,
        peers_are_behind: bool = False,
    ) -> None:
        """Begin a round.

        Args:
            number: of the round, the same on all workers, and above the number before; or that
                number, for a worker that was left out and is back.
            spans: that it gives out, the same on all workers.
            share: this worker's place, and how large the parts of all workers are beside each
                other, where each claims from a part of its own; None: all claim from the same
                spans.
            smallest: no claim has fewer samples, unless the whole round has; the same on all
                workers, >= 1.
            sweeps: True on one worker, which deletes the store's entries of earlier rounds.
            peers_are_behind: whether peers may still claim from the round before, so that its entry
                stays until the next round begins.
        """
        assert number >= self.round, f"round {number} after round {self.round}"
        # All workers have merged since the other rounds, so that none claims from them any more.
        if 0 <= self.round < number:
            self._old.append((self.round, self._given(self.round)))
        while self._old and self._old[0][0] < (self.round if peers_are_behind else number):
            _, old = self._old.popleft()
            if sweeps:
                self._store.delete_key(old)
        self.round, self._spans, self._smallest = number, tuple(spans), smallest
        self._num_of_own = None
        if share is not None:
            (place, parts), total = share, num_positions(spans)
            begin, end, all_parts = sum(parts[:place]), sum(parts[: place + 1]), sum(parts)
            self._spans = part_of(spans, total * begin // all_parts, total * end // all_parts)
            self._num_of_own = 0
        self._is_exhausted, self.num_left = False, num_positions(self._spans)

    def claim_batches(
        self,
        batch_size: int,
        *,
        largest: int,
        samples_of_all: int,
        claim_s: float = 0.0,
        batch_s: float = 0.0,
    ) -> list[Claim]:
        """As `claim`, of one batch or of several, as `batches_at_once` says: the batches; none when
        nothing is left.

        Args:
            batch_size: in samples, >= 1.
            largest: a batch has no more samples.
            samples_of_all: see `batches_at_once`, as for the others.
        """
        count = batches_at_once(
            claim_s=claim_s,
            batch_s=batch_s,
            samples_left=self.num_left,
            samples_of_all=samples_of_all,
        )
        claim = self.claim(count * batch_size)
        if claim is None:
            return []
        return claim.batches(batch_size, smallest=self._smallest, largest=largest)

    def claim(self, num_samples: int) -> Claim | None:
        """Take the next `num_samples` of the round, or what is left of it; and also what is left
        behind them, where that is less than the smallest claim. None when nothing is left, from
        then on for good.
        """
        if self._is_exhausted:
            return None
        total = num_positions(self._spans)
        if self._num_of_own is None:
            # One atomic addition is the whole claim: two workers never get the same samples, and
            # none needs an answer from another.
            end = self._store.add(self._given(self.round), num_samples)
        else:
            end = self._num_of_own = self._num_of_own + num_samples
        begin = end - num_samples
        # The claim before this one ended at `begin`, and took what was too little for another.
        is_taken = begin > 0 and total - begin < self._smallest
        self._is_exhausted = begin >= total or is_taken
        end = end_of_claim(begin, num_samples, total, smallest=self._smallest)
        self.num_left = max(0, total - end)
        return None if self._is_exhausted else Claim(part_of(self._spans, begin, end))

    def ends_cut_short(self, *, is_cut_short: bool) -> bool:
        """End the round that is open here. All workers that call it get the same answer.

        Args:
            is_cut_short: whether this worker stopped claiming before it knew that nothing was left.

        Returns:
            `is_cut_short` of the worker that ended the round first. False: all of it was claimed.
        """
        key = f"{self._prefix}/ended/{self.round}"
        self._old.append((self.round, key))
        # The first word stands, since the entry is written only where there is none.
        word = self._store.compare_set(key, "", "cut" if is_cut_short else "all")
        return bool(word == b"cut")

    def _given(self, number: int) -> str:
        return f"{self._prefix}/given/{number}"
