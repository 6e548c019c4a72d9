"""Batches of any map-style dataset, claimed by the ranks that are free: each sample once an epoch,
in an order drawn from (seed, epoch).

    for each mega-batch of the epoch
        while samples are left: claim the next b_i, or several times as many where claiming takes
            long beside computing (`claims.batches_at_once`); compute with b_i at a time
        when nothing is left: merge models, and choose new b_i

A strategy may have models merged more often, after *rounds*: parts of a mega-batch that are claimed
one after the other. New b_i are chosen when the last of them is merged.

A round may also be a step of all ranks, of a batch each, with the mean of their gradients. New b_i
are chosen in each.

An epoch of N samples has round(N / M) mega-batches, at least one. Their sizes differ by one sample
at most: none is a remnant, and a dataset with fewer than M samples is one mega-batch. Positions of
samples are counted through all passes: number n of the order of epoch e stands at e N + n.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.codec.option_value import require_at_least
from offbeat.errors import CheckpointError, ConfigError, OffbeatError
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import (
    Claim,
    ClaimLog,
    ClaimRound,
    MegaBatchShare,
    MergedRound,
    SampleRange,
    SampleRanges,
    joined,
    num_positions,
    without,
)
from offbeat.megabatch.fetching import Fetcher, require_map_style


def order_of(
    num_samples: int, *, seed: int, epoch: int, shuffles: bool = True
) -> NDArray[np.integer]:
    """The numbers of the samples in the order of an epoch, shape (num_samples,): drawn anew for
    each, or the dataset's own unless it `shuffles`. Every rank keeps it for an epoch, so a number
    takes 4 bytes where that is enough.
    """
    dtype: type[np.integer] = np.int32 if num_samples <= np.iinfo(np.int32).max else np.int64
    if not shuffles:
        return np.arange(num_samples, dtype=dtype)
    return np.random.default_rng((seed, epoch)).permutation(num_samples).astype(dtype)


def description_of_order(num_samples: int, seed: int, *, shuffles: bool) -> dict[str, int]:
    """What the orders of all epochs depend on."""
    return {"samples": num_samples, "seed": seed, "shuffles": int(shuffles)}


def require_same_order(saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Raise `CheckpointError` unless the order of an epoch in whose middle a state was saved, by
    what it depends on, is that of the loader here.
    """
    if saved != here:
        raise CheckpointError(
            f"the state was saved in the middle of an epoch of {saved}, and this loader has {here}:"
            " of what is left some samples would come twice and others never; make it with these,"
            " or save between two epochs"
        )


def mega_batch_span(num_samples: int, mega_batch: int, number: int) -> SampleRange:
    """Where mega-batch `number` of an epoch lies in its order.

    >>> [mega_batch_span(10, 4, number) for number in (0, 1)]
    [SampleRange(begin=0, end=3), SampleRange(begin=3, end=6)]
    """
    count = num_mega_batches(num_samples, mega_batch)
    return SampleRange(num_samples * number // count, num_samples * (number + 1) // count)


def num_mega_batches(num_samples: int, mega_batch: int) -> int:
    """How many mega-batches an epoch has: num_samples / mega_batch, rounded, at least 1."""
    return max(1, (2 * num_samples + mega_batch) // (2 * mega_batch))


def data_description(
    dataset: object,
    *,
    seed: int,
    shuffles: bool = True,
    batch_size: int | None,
    max_batch_size: int | None,
    claims: bool,
    claims_ahead: int | None,
) -> dict[str, Any]:
    """What of a loader must be the same on all ranks, as JSON.

    Args:
        dataset: that the loader is to read.
        seed: of the order.
        shuffles: whether the order is drawn anew for each epoch.
        batch_size: given to the loader.
        max_batch_size: given to the loader.
        claims: whether samples are claimed, in batches whose size the strategy changes; all ranks
            begin with the same.
        claims_ahead: given to the loader.

    Raises:
        ConfigError: this cannot work.
    """
    num_samples = require_map_style(dataset)
    require_at_least("seed", seed, 0)
    for name, size in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
        if size is not None:
            require_at_least(name, size, 1)
    if batch_size is None:
        raise ConfigError(
            "nothing says how large a batch is: pass batch_size=..., or a DataLoader that has one"
        )
    if not claims and (max_batch_size is not None or claims_ahead is not None):
        raise ConfigError(
            "max_batch_size and claims_ahead are for strategies that claim samples, such as"
            " offbeat.AdaptiveSGD()"
        )
    description: dict[str, Any] = {"samples": num_samples, "seed": seed}
    if not shuffles:
        description["shuffles"] = False
    if claims:
        description["batch_size"] = batch_size
    return {"data": description}


class DispatchLoader(Callback):
    """Iterating over it yields this rank's batches of an epoch; how many, nobody knows before. It
    is made by `Session.loader`.

    All ranks must iterate. A rank that stops in the middle of an epoch goes on there when it
    iterates again, or with the next one where nothing is left for it; its peers wait for it at the
    next merge. To stop all ranks together, take `one_mega_batch()` at a time.

    Args:
        fetcher: reads batches of the dataset, which is the same on all ranks.
        log: of claims.
        policy: the strategy's callback.
        seed: of the order, >= 0.
        shuffles: whether the order is drawn anew for each epoch; else it is the dataset's.
        rank: this rank.
        notify: for remarks.
        clock: returns seconds, monotonic.

    Attributes:
        epoch: number of completed passes over the data.
        mega_batch: number of merged mega-batches of the pass under way.
        batch_position: how many samples of the pass stand before those of the batch handed out
            last, which says how far the run is.
        last: what each worker computed of the mega-batch merged last, for the workers in that
            merge, by rank; empty before the first merge. A worker that came in within that
            mega-batch knows what was computed since then.
    """

    state_key: ClassVar[str] = "loader"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        log: ClaimLog,
        policy: MegaBatchCallback,
        seed: int,
        rank: int,
        notify: Callable[[str], None],
        shuffles: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = self.mega_batch = self.batch_position = 0
        self.last: Sequence[MegaBatchShare] = ()
        self._fetcher, self._num_samples = fetcher, fetcher.num_samples
        self._shuffles, num_samples = shuffles, fetcher.num_samples
        self._order_here = description_of_order(num_samples, seed, shuffles=shuffles)
        # The one of the epoch under way is kept.
        self._order_of = lru_cache(1)(lambda epoch: order_of(num_samples, seed=seed, epoch=epoch))
        self._log, self._policy, self._notify, self._clock = log, policy, notify, clock
        self._rank = rank
        self._open_round: ClaimRound | None = None
        # Of the mega-batch under way: what was merged in its earlier rounds, by rank and in all.
        self._earlier_shares: dict[int, MegaBatchShare] = {}
        self._merged: SampleRanges = ()
        # The round whose merge is under way, with what this rank computed of it; and what a merge
        # before it has lost, to be given out again after the next one.
        self._in_merge: _RoundInMerge | None = None
        self._lost: SampleRanges = ()
        # How many mega-batches the user has heard of.
        self._num_told = 0
        self._retry = 0  # Of the round under way, as in `ClaimRound`.
        # The batches of the open round that are still to come, and the claims of those that are
        # being read ahead. A loop that stops, and goes on with the round later, gets them then.
        self._batches: Iterator[Any] | None = None
        # Whether the open round is a step of all ranks, and what has come of it.
        self._is_step, self._stepped = False, False
        self._merged_step: MergedRound | None = None
        self._ahead: deque[Claim] = deque()
        # Whether nothing more is claimed of the open round, since a worker is on its way in.
        self._is_cut_short = False
        # A claim is handed to the user, then computed, once the optimizer has stepped.
        self._handed_out: list[Claim] = []
        self._computed: list[Claim] = []
        self._updates, self._busy_s = 0, 0.0
        self._asked_at_s: float | None = None
        self._rests_within_batch = False
        self._waited_s, self._said_that_it_waits = 0.0, False
        # Of the latest claims, and of the latest batches without them. Medians are taken, since a
        # single claim that was held up says nothing about the next one.
        self._claims_s: deque[float] = deque(maxlen=_RECENT)
        self._batches_s: deque[float] = deque(maxlen=_RECENT)
        self._claimed_for_s = 0.0  # since the batch before was asked for
        if policy.joined_by is not None:
            self._begin()

    def __iter__(self) -> Iterator[Any]:
        epoch, was_left = self.epoch, self._batches is not None
        while self.epoch == epoch:
            self._begin()  # It knows the mega-batch.
            is_last = self.mega_batch + 1 == self.num_mega_batches
            for batch in self.one_mega_batch(goes_on=not is_last):
                was_left = False
                yield batch
            if was_left and self.epoch != epoch:
                # The loop before ended with the last batch of its pass, without asking for more.
                epoch, was_left = self.epoch, False

    def __len__(self) -> int:
        """How many batches this rank has in an epoch if all ranks make as many updates, which is
        what batch sizes are chosen for: an estimate, the same on all ranks.
        """
        return -(-self._num_samples // sum(self._policy.batch_sizes))

    @property
    def num_mega_batches(self) -> int:
        """How many mega-batches an epoch has. There may be more merges than these."""
        return num_mega_batches(self._num_samples, self._policy.samples_of_mega_batch)

    @property
    def num_merged(self) -> int:
        """How many mega-batches have been merged as a whole, over all passes. One whose merge is
        under way counts.
        """
        return self.epoch * self.num_mega_batches + self.mega_batch

    @property
    def num_samples_merged(self) -> int:
        """How many samples of the pass under way stand before the mega-batch under way. Of that
        one, rounds may have been merged too.
        """
        size = self._policy.samples_of_mega_batch
        return mega_batch_span(self._num_samples, size, self.mega_batch).begin

    def one_mega_batch(self, *, goes_on: bool = False) -> Iterator[Any]:
        """This rank's batches of the next mega-batch, or of what is left of the one under way.

        Args:
            goes_on: whether the caller asks for the next mega-batch at once, so that this one's
                merge may be under way meanwhile, where the strategy overlaps merges; the same on
                all ranks. False: all ranks hold the merged model afterwards.
        """
        self._begin()
        under_way = self.epoch, self.mega_batch
        # A round that lost a worker is followed by one of the same mega-batch.
        while (self.epoch, self.mega_batch) == under_way:
            yield from self._rest_of_round()
            if self._open_round is None:
                return  # A state was loaded meanwhile.
            self._merge(overlaps=goes_on or bool(self._open_round.later))
            self._tell()

    @property
    def merge_is_under_way(self) -> bool:
        """Whether the last merge goes on beside the batches that are handed out."""
        return self._in_merge is not None

    def end_merge(self) -> None:
        """Wait for the merge that is under way, if any: this rank's model is the merged one then,
        with what the rank has done since the merge began. No collective.
        """
        self._settle()
        self._tell()

    # Events

    @override
    def on_before_update(self) -> None:
        if self._is_step and not self._stepped and self._handed_out:
            self._step_together(takes_step=True)

    def _step_together(self, *, takes_step: bool) -> None:
        """Average gradients with all ranks, which ends the open round."""
        assert self._open_round is not None, "no round is open"
        self._note_busy()
        share = self._share([*self._computed, *self._handed_out], updates=1)
        self._stepped = True
        self._merged_step = self._policy.step_together(
            share, self._open_round, takes_step=takes_step
        )

    def _share(self, claims: Sequence[Claim], *, updates: int) -> MegaBatchShare:
        return MegaBatchShare(
            rank=self._rank,
            claims=tuple(claims),
            updates=updates,
            batch_size=self._policy.batch_size,
            busy_s=self._busy_s,
        )

    @override
    def on_after_step(self) -> None:
        if self._handed_out:
            self._computed += self._handed_out
            self._handed_out = []
            self._updates += 1
        if self._in_merge is not None and self._policy.merge_is_over:
            self._settle()

    # An evaluation says nothing of how fast this rank trains.

    @override
    def on_rest(self) -> None:
        self._rests_within_batch = self._asked_at_s is not None
        self._note_busy()

    @override
    def on_resume(self) -> None:
        if self._rests_within_batch:
            self._asked_at_s = self._clock()

    # One mega-batch

    def _begin(self) -> None:
        """Agree on where to begin, unless that is known."""
        if self._policy.joined_by is not None:
            self._go_on_after(self._policy.joined_by)
            self._policy.joined_by = None
        elif self._open_round is None:
            self._agree_on_round()

    def _agree_on_round(self) -> None:
        """Begin with what no rank's model has seen: a whole mega-batch, or what was not computed
        when a run was saved.
        """
        mine = {
            "place": [self.epoch, self.mega_batch],
            "merged": self._merged,
            "round": self._log.round,
            "retry": self._retry,
            "computed": [span for claim in self._computed for span in claim.spans],
            "lost": self._lost,
        }
        by_rank = self._policy.gather(mine)
        if by_rank is None:
            assert self._policy.joined_by is not None, "the peers have loaders too"
            self._begin()
            return
        places = {rank: tuple(theirs["place"]) for rank, theirs in by_rank.items()}
        # Ranks that went on beside a merge, which is in none of their models, may have been saved
        # on both sides of it.
        self.epoch, self.mega_batch = max(places.values())
        unmerged = {self._unmerged_of(theirs) for theirs in by_rank.values()}
        if len(unmerged) > 1:
            raise CheckpointError(
                "the ranks' states were saved in different mega-batches (epoch and number by rank:"
                f" {places}), or after different merges; save them on all ranks between the same"
                " two merges, as after loader.one_mega_batch()"
            )
        seen = [span for theirs in by_rank.values() for span in _ranges_of(theirs["computed"])]
        (left,) = unmerged
        self._merged, self._lost = without(self._whole(self.epoch, self.mega_batch), left), ()
        spans = without(left, seen)
        # Above every rank's number, so that no entry of an earlier round is read.
        number = 1 + max(theirs["round"] for theirs in by_rank.values())
        retry = max(theirs["retry"] for theirs in by_rank.values())
        mega_batch = self.mega_batch
        rest = ClaimRound(
            epoch=self.epoch, mega_batch=mega_batch, round=number, retry=retry, spans=spans
        )
        self._open(self._cut(rest))

    def _unmerged_of(self, theirs: Mapping[str, Any]) -> SampleRanges:
        """What a rank's model has not seen by merges, up to the end of the mega-batch under way."""
        (first,), (last,) = self._whole(*theirs["place"]), self._whole(self.epoch, self.mega_batch)
        merged, lost = _ranges_of(theirs["merged"]), _ranges_of(theirs["lost"])
        return joined((*lost, *without([SampleRange(first.begin, last.end)], merged)))

    def _cut(self, claim_round: ClaimRound) -> ClaimRound:
        """As much of the rest of a mega-batch as is computed until the next merge. Where merges are
        depends on places in the mega-batch alone, so that a run that was saved between two of them
        goes on with the same ones.
        """
        (whole,) = self._whole(claim_round.epoch, claim_round.mega_batch)
        unmerged = without((whole,), self._merged)
        end = whole.begin
        while unmerged and end <= unmerged[0].begin:
            size = self._policy.samples_of_round(end)
            left = whole.end - end
            end = whole.end if size is None or 2 * left < 3 * size else end + size
        return claim_round.cut(end)

    def _open(self, claim_round: ClaimRound) -> None:
        policy = self._policy
        ranks = self._ranks = policy.ranks
        before = min((span.begin for span in claim_round.spans), default=0)
        # A mega-batch ends with a merge of models: nobody is beyond it before all have come there.
        self._is_step = (
            bool(claim_round.later)
            and claim_round.retry == 0
            and self._in_merge is None
            and not self._lost
            and policy.steps_together(before, num_positions(claim_round.spans))
        )
        self._stepped, self._merged_step = False, None
        parts = (1,) * len(ranks) if policy.shares_equally else policy.batch_sizes
        in_parts = policy.shares_equally or self._is_step
        self._log.open(
            claim_round.round,
            claim_round.spans,
            share=(ranks.index(self._rank), parts) if in_parts else None,
            smallest=self._policy.smallest_claim,
            sweeps=self._rank == min(ranks),
            peers_are_behind=self._in_merge is not None,
        )
        self._open_round, self._retry = claim_round, claim_round.retry
        self._batches, self._is_cut_short = None, False
        self._ahead.clear()

    def _rest_of_round(self) -> Iterator[Any]:
        """This rank's batches of the open round that are still to come."""
        while True:
            now_s = self._note_busy()
            self._tell()
            if self._is_away or self._open_round is None:
                return  # What is being read ahead is given out again, with all that this rank had.
            if self._batches is None:
                self._batches = self._fetcher.batches(self._claimed_samples(), epoch=self.epoch)
            was_ahead = bool(self._ahead)
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            except OffbeatError:
                raise
            except Exception:
                # Samples that cannot be read count as handed out, else they came again for ever.
                self._hand_out()
                raise
            if was_ahead:
                self._waited_s += self._clock() - now_s
            self._asked_at_s = now_s
            self._hand_out()
            try:
                yield batch
            except GeneratorExit:
                self._note_busy()  # What a loop does after it was left is no training.
                raise

    def _note_busy(self) -> float:
        """Add the time since a batch was asked for, unless that was done. Returns the time.

        It is what this rank computes, and must not be counted as waiting for peers. A CUDA device
        computes in the background: without waiting for it, this rank would claim more than it gets
        done, and look as fast as it can launch kernels.
        """
        if self._policy.device.type == "cuda":
            torch.cuda.synchronize(self._policy.device)
        now_s = self._clock()
        if self._asked_at_s is not None:
            self._busy_s += now_s - self._asked_at_s
            self._batches_s.append(max(0.0, now_s - self._asked_at_s - self._claimed_for_s))
        self._asked_at_s, self._claimed_for_s = None, 0.0
        return now_s

    def _claimed_samples(self) -> Iterator[list[int]]:
        """The samples of one batch of the open round after the other, by number. A claim is made
        when the samples of its first batch are asked for.
        """
        while not self._is_away:
            if (
                self._policy.group.has_newcomers
                and not self.merge_is_under_way
                and (self._ahead or self._handed_out or self._computed)
            ):
                # They wait for the next merge. One that is under way is made anew with them. One of
                # nothing would add the merges' momentum for nothing, and a worker that comes again
                # and again would stop all training.
                self._is_cut_short = True
                return
            begin_s = self._clock()
            batches = self._log.claim_batches(
                max(1, self._log.num_left) if self._is_step else self._policy.batch_size,
                largest=self._policy.largest_batch,
                samples_of_all=sum(self._policy.batch_sizes),
                claim_s=median(self._claims_s) if self._claims_s else 0.0,
                batch_s=median(self._batches_s) if self._batches_s else 0.0,
            )
            took_s = self._clock() - begin_s
            self._claimed_for_s += took_s
            self._claims_s.append(took_s)
            if not batches:
                return
            for batch in batches:
                self._ahead.append(batch)
                yield self._indices(batch)

    def _hand_out(self) -> None:
        """The batch that was asked for first, of those being read, is the user's now."""
        if self._ahead:
            claim = self._ahead.popleft()
            self._handed_out.append(claim)
            self.batch_position = claim.spans[0].begin - self.epoch * self._num_samples
            if not self._is_step:  # Rates are for as many samples as all ranks have together.
                self._policy.batch_handed_out(claim.num_samples)

    @property
    def _is_away(self) -> bool:
        """Whether the peers have gone on without this rank."""
        return self._policy.group.is_new or self._policy.joined_by is not None

    def _merge(self, *, overlaps: bool) -> None:
        """The open round has come to its end: merge, and go on with the next one.

        Args:
            overlaps: whether to go on while the merge is under way, where the strategy does so.
        """
        self._settle()
        self._tell()
        if self._policy.joined_by is not None:
            # What this rank had claimed was lost when it was left out.
            self._begin()
            return
        assert self._open_round is not None, "no round is open"
        if self._is_step:
            if not self._stepped:
                self._step_together(takes_step=False)
            if self._merged_step is None:
                self._begin()
            else:
                self._note_other_workers(self._ranks, self._merged_step)
                self._go_on_after(self._merged_step)
            return
        # The user chose not to step with these. They count as computed, else they would be given
        # out again for ever.
        self._computed += self._handed_out
        share = self._share(self._computed, updates=self._updates)
        over, following = self._open_round, None
        # What is given out again, or is to be with this merge, is all of one kind.
        is_first = over.retry == 0 and not self._lost
        share = replace(share, is_cut_short=self._is_cut_short and is_first)
        if self._lost:
            # What an earlier merge has lost is given out as if it had been claimed in this round.
            # All ranks wait for this merge, so that it is before they go any further.
            over = replace(over, spans=(*self._lost, *over.spans))
        elif (
            overlaps
            and self._goes_on
            and not self._log.ends_cut_short(is_cut_short=share.is_cut_short)
        ):
            share, following = replace(share, is_cut_short=False), self._following(over)
        ranks = self._policy.ranks
        self._policy.begin_merge(share, over, following)
        if following is not None:
            self._in_merge = _RoundInMerge(
                claim_round=over, share=share, ranks=ranks, following=following
            )
            self._reset_share()
            self._move_to(following)
            self._open(following)
            return
        merged = self._policy.end_merge()
        if merged is None:
            self._begin()
            return
        self._note_other_workers(ranks, merged)
        self._go_on_after(merged)

    @property
    def _goes_on(self) -> bool:
        """Whether this rank may go on while the open round is merged. What was lost once is not to
        be lost again before it is noticed.
        """
        over = self._open_round
        assert over is not None
        is_whole = over.spans == self._whole(over.epoch, over.mega_batch)
        may = self._policy.overlaps_merge(is_whole=is_whole) and not self._policy.group.is_new
        return over.retry == 0 and may

    def _following(self, over: ClaimRound) -> ClaimRound:
        """The round after `over`, where no claim of it is lost in its merge."""
        following = over.after([Claim(over.spans)], self._whole, self.num_mega_batches)
        position = self.epoch, self.mega_batch, self._merged
        self._move_to(following)
        following = self._cut(following)
        self.epoch, self.mega_batch, self._merged = position
        return following

    def _settle(self) -> None:
        """Wait for the merge that is under way, if any, and take note of what came of it."""
        if self._in_merge is None:
            return
        merged = self._policy.end_merge()
        in_merge, self._in_merge = self._in_merge, None
        if self._policy.joined_by is not None:
            return
        assert merged is not None, "the merge was begun"
        self._note_other_workers(in_merge.ranks, merged)
        self._add_shares(merged, in_merge.following)
        self._lose(merged)

    def _lose(self, merged: MergedRound) -> None:
        """What departed workers had claimed of a round that was merged is to be given out again,
        after the round that is under way.
        """
        self._lost = merged.left
        self._merged = without(self._merged, self._lost)

    def _go_on_after(self, merged: MergedRound) -> None:
        """A round is over: go on with the one after it."""
        over = merged.claim_round
        # Shares of earlier rounds are added up, unless this rank was left out between them.
        if self._open_round is None or over.round != self._open_round.round:
            self._earlier_shares = {}
        self._in_merge, self._lost = None, ()
        self._note_waiting()
        self._reset_share()
        following = merged.next_round(self._whole, self.num_mega_batches)
        self._move_to(following)
        self._add_shares(merged, following)
        if merged.following is not None:
            self._lose(merged)
        elif following.retry == 0:
            following = self._cut(following)
        self._open(following)

    def _move_to(self, following: ClaimRound) -> None:
        """A round begins: what stands before it is merged, or will be."""
        self.epoch, self.mega_batch = following.epoch, following.mega_batch
        whole = self._whole(self.epoch, self.mega_batch)
        self._merged = without(whole, following.spans + following.later)

    def _reset_share(self) -> None:
        self._handed_out, self._computed = [], []
        self._updates, self._busy_s, self._asked_at_s = 0, 0.0, None

    def _add_shares(self, merged: MergedRound, following: ClaimRound) -> None:
        """Add what was computed of a round to what was of the mega-batch, which ends with it unless
        `following` belongs to it.
        """
        over, earlier = merged.claim_round, self._earlier_shares
        shares = {rank: replace(share, weight=0.0) for rank, share in earlier.items()}
        for share in merged.shares:
            shares[share.rank] = shares[share.rank].plus(share) if share.rank in shares else share
        if (over.epoch, over.mega_batch) == (following.epoch, following.mega_batch):
            self._earlier_shares = shares
        else:
            self.last = tuple(self._in_pass(shares[rank], over.epoch) for rank in sorted(shares))
            self._earlier_shares = {}

    def _in_pass(self, share: MegaBatchShare, epoch: int) -> MegaBatchShare:
        """The same with positions in one pass; those below 0 are of the pass before."""
        first = epoch * self._num_samples
        claims = (
            Claim(tuple(SampleRange(begin - first, end - first) for begin, end in claim.spans))
            for claim in share.claims
        )
        return replace(share, claims=tuple(claims))

    def _tell(self) -> None:
        """Let the user know of the mega-batches that were merged meanwhile: more than one where
        this rank was away.
        """
        merged = self.num_merged
        if self._in_merge is not None:
            over = self._in_merge.claim_round
            merged = over.epoch * self.num_mega_batches + over.mega_batch
        count, self._num_told = merged - self._num_told, merged
        if count:
            self._policy.mega_batches_merged(count)

    def _note_waiting(self) -> None:
        """A round is over: say so if much of it was spent on waiting for data."""
        spare, ahead = self._fetcher.spare_processes, self._fetcher.batches_ahead
        waits = self._busy_s > 0 and self._waited_s > _MUCH * self._busy_s
        if waits and spare and not self._said_that_it_waits:
            self._said_that_it_waits = True
            self._notify(
                f"{self._waited_s / self._busy_s:.0%} of this worker's time was spent waiting for"
                f" data: of the {ahead + spare} worker processes of its DataLoader"
                f" {ahead} read ahead. Session.loader(..., claims_ahead={ahead + 1}) lets more of"
                " them; each claims a batch ahead, so that a slow worker may hold up its peers for"
                " longer"
            )
        self._waited_s = 0.0

    def _note_other_workers(self, ranks: Sequence[int], merged: MergedRound) -> None:
        """Say so where the workers of the next round are not `ranks`, those of the last one."""
        departed = sorted(set(ranks) - {share.rank for share in merged.shares})
        over = merged.claim_round
        if departed and (left := num_positions(merged.left)):
            which = f"worker{'s' if len(departed) > 1 else ''} {', '.join(map(str, departed))}"
            # Of a round that was cut short, nobody knows how many of them were claimed.
            count = "all" if merged.is_cut_short else str(left)
            self._notify(
                f"mega-batch {over.epoch}/{over.mega_batch}: {count} samples that {which} had taken"
                " are given out again"
            )

    def _whole(self, epoch: int, number: int) -> SampleRanges:
        size, first = self._policy.samples_of_mega_batch, epoch * self._num_samples
        begin, end = mega_batch_span(self._num_samples, size, number)
        return (SampleRange(first + begin, first + end),)

    def _indices(self, claim: Claim) -> list[int]:
        """The samples of a claim, whose spans may lie in two passes."""
        found: list[int] = []
        size = self._num_samples
        for begin, end in claim.spans:
            for first in range(begin // size * size, end, size):
                part = slice(max(begin - first, 0), min(end - first, size))
                if self._shuffles:
                    found += self._order_of(first // size)[part].tolist()
                else:
                    found += range(size)[part]
        return found

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What this rank's model has seen of the mega-batch under way. A claim counts once its
        optimizer step was taken.
        """
        if self._policy.merge_is_taken:
            self._settle()
        claims, merged, lost = self._computed, self._merged, self._lost
        updates, busy_s, earlier = self._updates, self._busy_s, self._earlier_shares
        if self._in_merge is not None:
            # The merge that is under way is not in the model. It is left out, so that the models
            # are merged once, later, with what was computed since.
            over, share = self._in_merge.claim_round, self._in_merge.share
            lost, merged = over.spans, without(merged, over.spans)
            claims = [*share.claims, *claims]
            updates, busy_s = updates + share.updates, busy_s + share.busy_s
            if (over.epoch, over.mega_batch) != (self.epoch, self.mega_batch):
                earlier = {}
        lost = without(lost, self._whole(self.epoch, self.mega_batch))
        return {
            "local": {
                "epoch": self.epoch,
                "mega_batch": self.mega_batch,
                "samples_of_mega_batch": self._policy.samples_of_mega_batch,
                "order": self._order_here,
                "merged": [list(span) for span in merged],
                "lost": [list(span) for span in lost],
                "untold": self.num_merged - self._num_told,
                "retry": self._retry,
                "earlier_shares": {
                    str(rank): asdict(share) | {"claims": _spans_of(share.claims)}
                    for rank, share in earlier.items()
                },
            },
            "owned": {
                f"computed/{self._rank}": {
                    "claims": _spans_of(claims),
                    "updates": updates,
                    "busy_s": busy_s,
                }
            },
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved, owned = state["local"], state["owned"]
        if "mega_batch" not in saved:
            raise CheckpointError("the state lacks 'mega_batch'; it was saved by another loader")
        is_within = any(saved.get(key) for key in ("mega_batch", "merged", "lost"))
        if is_within or any(computed["claims"] for computed in owned.values()):
            require_same_order(saved["order"], self._order_here)
        self.epoch, self.mega_batch = int(saved["epoch"]), int(saved["mega_batch"])
        self._merged, self._lost = _ranges_of(saved["merged"]), _ranges_of(saved["lost"])
        size = saved.get("samples_of_mega_batch", self._policy.samples_of_mega_batch)
        if size != self._policy.samples_of_mega_batch:
            self._find_place(size)
        self._in_merge, self._num_told = None, self.num_merged - int(saved.get("untold", 0))
        self._retry = int(saved.get("retry", 0))
        self._earlier_shares = {
            share["rank"]: MegaBatchShare(**{**share, "claims": tuple(_claims_of(share["claims"]))})
            for share in saved["earlier_shares"].values()
        }
        self._computed, self._updates, self._busy_s = [], 0, 0.0
        for name, computed in owned.items():
            rank = int(name.rpartition("/")[2])
            # Of a rank that is no more, another one takes over what it computed: the mean of the
            # models has seen it, so that nobody is given it again.
            if self._rank in (rank, rank % len(self._policy.ranks)):
                self._computed += _claims_of(computed["claims"])
                self._updates += int(computed["updates"])
                self._busy_s += float(computed["busy_s"])
        self._handed_out, self._asked_at_s, self._waited_s = [], None, 0.0
        self._open_round, self._batches = None, None
        self._ahead.clear()

    @override
    def load_older_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        # What is called at merges, such as a scheduler, was saved beside it.
        saved = state["local"]
        merged = int(saved["epoch"]) * self.num_mega_batches + int(saved["mega_batch"])
        self._num_told = merged - int(saved.get("untold", 0))

    def _find_place(self, samples_of_mega_batch: int) -> None:
        """Go on with the mega-batch in which the one that was under way begins, where these had
        another size when the state was saved. What was computed behind its end comes again.
        """
        first, size = self.epoch * self._num_samples, self._num_samples
        begin = first + mega_batch_span(size, samples_of_mega_batch, self.mega_batch).begin
        unmerged = without([SampleRange(begin, first + size)], self._merged)
        spans = (self._whole(self.epoch, number) for number in range(self.num_mega_batches))
        self.mega_batch = next(n for n, ((_, end),) in enumerate(spans) if end > begin)
        whole = self._whole(self.epoch, self.mega_batch)
        self._merged = without(whole, [*unmerged, *self._lost])
        self._lost = without(self._lost, whole)

    @override
    def close(self) -> None:
        self._batches = None
        self._fetcher.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _RoundInMerge:
    """A round whose merge is under way.

    Attributes:
        claim_round: the round.
        share: what this rank computed of it.
        ranks: of those who took part when the merge began.
        following: the round that is open meanwhile.
    """

    claim_round: ClaimRound
    share: MegaBatchShare
    ranks: tuple[int, ...]
    following: ClaimRound


def _ranges_of(spans: Iterable[Iterable[int]]) -> SampleRanges:
    """Spans that were written as JSON."""
    return tuple(SampleRange(*span) for span in spans)


def _spans_of(claims: Iterable[Claim]) -> list[list[list[int]]]:
    """Claims, as JSON."""
    return [[list(span) for span in claim.spans] for claim in claims]


def _claims_of(spans: Iterable[Iterable[Iterable[int]]]) -> list[Claim]:
    """Inverse of `_spans_of`."""
    return [Claim(_ranges_of(claim)) for claim in spans]


_RECENT = 9
"""How many claims and batches say how long these take."""

_MUCH = 0.25
"""The part of its time that a rank may wait for data before it says so."""
