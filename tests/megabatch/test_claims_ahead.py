"""Batches are read ahead of the one that is computed: what was claimed for them and not used comes
again, whoever dies, stops or is saved when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from typing_extensions import override

from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import (
    Claim,
    ClaimLog,
    ClaimRound,
    MegaBatchShare,
    MergedRound,
    SampleRange,
)
from offbeat.megabatch.fetching import Fetcher
from offbeat.megabatch.loader import (
    DispatchLoader,
    mega_batch_span,
    num_mega_batches,
    order_of,
)
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.session.state import reshard_callback

SEED = 1


class NumbersAhead(Fetcher):
    """Batches that are the numbers of their samples, asked for as worker processes ask for them."""

    def __init__(self, num_samples: int, *, batches_ahead: int, spare_processes: int = 0) -> None:
        self.num_samples, self.batches_ahead = num_samples, batches_ahead
        self.spare_processes = spare_processes

    @override
    def batches(self, numbers: Iterable[list[int]], *, epoch: int) -> Iterator[list[int]]:
        lists = iter(numbers)
        reading = deque(islice(lists, self.batches_ahead))
        while True:
            reading.extend(islice(lists, 1))
            if not reading:
                return
            yield reading.popleft()


class WaitingError(Exception):
    """A collective call waits for other ranks; it is to be made again."""


class Peers:
    """What the ranks of one process tell each other, and what they have merged."""

    def __init__(self, num_ranks: int) -> None:
        self.store = HashStore()
        self.living = set(range(num_ranks))
        self.merged: Counter[int] = Counter()
        self.num_changes = 0
        """Of what the answer to a collective call depends on."""
        self._told: dict[int, Any] = {}
        self._answer: dict[int, Any] | None = None
        self._to_hear: set[int] = set()

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        """All ranks' values. One that dies after it has told its value is heard, too."""
        self._to_hear &= self.living
        if not self._to_hear:
            self._answer = None
        if self._answer is None:
            self._told[rank] = value
            if not self.living <= self._told.keys():
                raise WaitingError
            self._answer, self._to_hear = dict(sorted(self._told.items())), set(self.living)
            self._told = {}
            self.num_changes += 1
            for theirs in self._answer.values():
                if isinstance(theirs, tuple):
                    self.note_merged(theirs[0])
        if rank not in self._to_hear:
            raise WaitingError
        self._to_hear.remove(rank)
        self.num_changes += 1
        return self._answer

    def leave_out(self, rank: int) -> None:
        """The others go on without what this rank has told, and it without what they have."""
        self._told.pop(rank, None)
        self._to_hear.discard(rank)
        self.num_changes += 1

    def die(self, rank: int) -> None:
        self.living.remove(rank)
        self.num_changes += 1

    def note_merged(self, share: MegaBatchShare) -> None:
        self.merged.update(
            position for claim in share.claims for span in claim.spans for position in range(*span)
        )


class Policy(MegaBatchCallback):
    """Batches of three samples, and merges of nothing, some of them within a mega-batch."""

    smallest_claim = 2
    batch_size = 3
    largest_batch = 4
    shares_equally = False
    device = torch.device("cpu")
    samples_of_mega_batch = 12
    merge_is_taken = False
    merge_is_over = False

    def __init__(self, rank: int, peers: Peers) -> None:
        self.joined_by: MergedRound | None = None
        self.num_merged = 0
        self.rounds: list[ClaimRound] = []
        self.ranks = tuple(sorted(peers.living))
        self.batch_sizes = (self.batch_size,) * len(self.ranks)
        self.group = AtomicGroup(peers.store, count=lambda driver: driver, notify=lambda _: None)
        self._rank, self._peers = rank, peers

    @override
    def gather(self, value: Any) -> Mapping[int, Any]:
        return self._peers.exchange(self._rank, value)

    @override
    def samples_of_round(self, samples_before: int) -> int | None:
        return (None, 4, 7)[samples_before % 3]

    @override
    def steps_together(self, samples_before: int, num_samples: int) -> bool:
        return False

    @override
    def mega_batches_merged(self, count: int) -> None:
        self.num_merged += count

    @override
    def overlaps_merge(self, *, is_whole: bool) -> bool:
        return False

    @override
    def batch_handed_out(self, num_samples: int) -> None:
        """Learning rates are not scaled."""

    @override
    def begin_merge(
        self, share: MegaBatchShare, claim_round: ClaimRound, following: ClaimRound | None
    ) -> None:
        assert following is None
        self._begun = share, claim_round

    @override
    def end_merge(self) -> MergedRound | None:
        was_left_out = self.group.is_new
        told = [
            theirs
            for theirs in self._peers.exchange(
                self._rank, None if was_left_out else self._begun
            ).values()
            if theirs is not None
        ]
        self.group.is_new = self.group.has_newcomers = False
        self.rounds.append(self._begun[1])
        self.ranks = tuple(sorted(self._peers.living))
        self.batch_sizes = (self.batch_size,) * len(self.ranks)
        merged = MergedRound(
            claim_round=told[0][1], shares=tuple(share for share, _ in told), ranks=self.ranks
        )
        if was_left_out:
            self.joined_by = merged
            return None
        return merged


class Worker:
    """A rank with a loader, which does one thing at a time."""

    def __init__(
        self,
        rank: int,
        peers: Peers,
        *,
        num_samples: int,
        ahead: int,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy(rank, peers)
        self.loader = DispatchLoader(
            NumbersAhead(num_samples, batches_ahead=ahead),
            log=ClaimLog(peers.store),
            policy=self.policy,
            seed=SEED,
            rank=rank,
            notify=lambda remark: None,
        )
        self.has_begun = False
        self._peers, self._waits_since = peers, -1
        self._num_samples = num_samples
        self._batches: Iterator[list[int]] | None = None

    @property
    def waits(self) -> bool:
        """Whether nothing has changed since it found that it has to wait."""
        return self._waits_since == self._peers.num_changes

    @property
    def place(self) -> tuple[int, int, int]:
        """Passes, mega-batches and samples of the mega-batch under way that were merged."""
        saved = self.loader.state_dict()["local"]
        merged = sum(end - begin for begin, end in saved.get("merged", ()))
        return saved["epoch"], saved["mega_batch"], merged

    def advance(self) -> None:
        """Compute a batch, or merge if all others are ready to."""
        if self._batches is None:
            self._batches = self.loader.one_mega_batch()
        try:
            samples = next(self._batches)
        except (StopIteration, WaitingError) as ended:
            self.stop()
            if isinstance(ended, WaitingError):
                self._waits_since = self._peers.num_changes
            return
        self.has_begun = True
        self.loader.on_after_step()
        (computed,) = self.loader.state_dict()["owned"].values()
        spans = computed["claims"][-1]
        order = order_of(self._num_samples, seed=SEED, epoch=self.loader.epoch)
        assert samples == [index for begin, end in spans for index in order[begin:end]]

    def stop(self) -> None:
        """Leave the loop over the batches; a later one goes on behind it."""
        self._batches = None


settings = {
    "num_samples": st.integers(1, 40),
    "ahead": st.lists(st.integers(0, 3), min_size=1, max_size=4),
    "data": st.data(),
}


@given(**settings)
def test_every_sample_is_merged_once_whoever_dies_or_stops(
    num_samples: int, ahead: list[int], data: st.DataObject
) -> None:
    peers = Peers(len(ahead))
    workers = [
        Worker(rank, peers, num_samples=num_samples, ahead=by) for rank, by in enumerate(ahead)
    ]
    while True:
        knowing = [rank for rank in peers.living if not workers[rank].policy.group.is_new]
        if all(workers[rank].loader.epoch for rank in knowing):
            break
        rank = data.draw(
            st.sampled_from(
                [
                    rank
                    for rank in sorted(peers.living)
                    if not workers[rank].loader.epoch and not workers[rank].waits
                ]
            )
        )
        worker = workers[rank]
        fate = data.draw(
            st.sampled_from(
                ["goes on"] * 9 + ["stops", "dies", "is left out", "hears of a newcomer"]
            )
        )
        can_be_spared = len(knowing) > 1 and not any(workers[r].loader.epoch for r in knowing)
        if fate == "stops":
            worker.stop()
        elif fate == "hears of a newcomer":
            worker.policy.group.has_newcomers = True
        elif fate == "dies" and can_be_spared:
            peers.die(rank)
            continue
        elif fate == "is left out" and can_be_spared and worker.has_begun:
            worker.policy.group.is_new = True
            peers.leave_out(rank)
        worker.advance()
    assert peers.merged == Counter(range(num_samples))


def computed_in(states: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The claims that were computed, of all ranks."""
    return sorted(
        claim for state in states for each in state["owned"].values() for claim in each["claims"]
    )


@given(**settings, moves=st.integers(0, 30))
def test_what_was_claimed_ahead_is_not_saved(
    num_samples: int, ahead: list[int], moves: int, data: st.DataObject
) -> None:
    """And what was computed comes to nobody again, however many ranks go on."""
    peers = Peers(len(ahead))
    workers = [
        Worker(rank, peers, num_samples=num_samples, ahead=by) for rank, by in enumerate(ahead)
    ]
    for _ in range(moves):
        busy = [worker for worker in workers if not worker.loader.epoch and not worker.waits]
        if busy:
            data.draw(st.sampled_from(busy)).advance()
    while len({worker.place for worker in workers}) > 1:
        min(workers, key=lambda worker: worker.place).advance()
    states = [worker.loader.state_dict() for worker in workers]
    num_ranks = data.draw(st.integers(1, 4))
    resumed = Peers(num_ranks)
    resumed.merged = Counter(peers.merged)
    workers = [
        Worker(rank, resumed, num_samples=num_samples, ahead=ahead[rank % len(ahead)])
        for rank in range(num_ranks)
    ]
    for rank, worker in enumerate(workers):
        worker.loader.load_state_dict(reshard_callback(states, num_ranks, rank))
    assert computed_in(worker.loader.state_dict() for worker in workers) == computed_in(states)
    mega_batches = [
        [*range(*mega_batch_span(num_samples, Policy.samples_of_mega_batch, number))]
        for number in range(num_mega_batches(num_samples, Policy.samples_of_mega_batch))
    ]
    while busy := [w for w in workers if not w.loader.epoch and not w.waits]:
        worker = data.draw(st.sampled_from(busy))
        worker.advance()
        # All of a mega-batch, also what was merged of it before the run was saved.
        claims = [claim for share in worker.loader.last for claim in share.claims]
        last = sorted(p for claim in claims for span in claim.spans for p in range(*span))
        assert not last or last in mega_batches
    assert resumed.merged == Counter(range(num_samples))


def test_what_is_given_out_again_says_nothing_about_speeds_after_a_resumption_either() -> None:
    """Of 12 samples, rank 1 dies with three; the run is saved before these are merged."""
    peers = Peers(2)
    alive, dying = (Worker(rank, peers, num_samples=12, ahead=0) for rank in range(2))
    for worker in (alive, dying, alive, dying):  # They agree where to begin, and take a batch each.
        worker.advance()
    peers.die(1)
    while not alive.policy.rounds:
        alive.advance()
    resumed = Worker(0, Peers(1), num_samples=12, ahead=0)
    resumed.loader.load_state_dict(alive.loader.state_dict())
    for worker in (alive, resumed):
        while not worker.loader.epoch:
            worker.advance()
    assert [over.retry for over in alive.policy.rounds] == [0, 1]
    assert [over.retry for over in resumed.policy.rounds] == [1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_nothing_more_is_claimed_while_a_worker_is_on_its_way_in(ahead: int) -> None:
    """Of 24 samples in mega-batches of 12, each has a batch of three, or one more ahead."""
    peers = Peers(2)
    workers = [Worker(rank, peers, num_samples=24, ahead=by) for rank, by in enumerate((ahead, 0))]
    for worker in (workers[0], workers[1], workers[0]):  # They agree where to begin.
        worker.advance()
    claimed = peers.store.add("claims/given/0", 0)
    for worker in workers:
        worker.policy.group.has_newcomers = True
    while not all(worker.policy.rounds for worker in workers):
        for worker in workers:
            worker.advance()
    assert peers.merged.total() == claimed < 12
    while not all(worker.loader.mega_batch for worker in workers):
        for worker in workers:
            worker.advance()
    # The rest of the mega-batch says as much about speeds as its first part.
    assert [over.retry for over in workers[0].policy.rounds] == [0] * len(workers[0].policy.rounds)
    assert peers.merged == Counter(range(12))
    assert sum(share.samples for share in workers[0].loader.last) == 12


def test_each_worker_has_a_batch_first_where_another_one_waits_from_the_beginning() -> None:
    peers = Peers(2)
    workers = [Worker(rank, peers, num_samples=24, ahead=0) for rank in range(2)]
    for worker in workers:
        worker.policy.group.has_newcomers = True
    while not all(worker.policy.rounds for worker in workers):
        for worker in workers:
            worker.advance()
    assert peers.merged.total() == 2 * Policy.batch_size


def test_a_rank_claims_as_far_ahead_as_it_may() -> None:
    """Two ranks: one takes a batch while it computes, the other has none ahead."""
    peers = Peers(2)
    eager, plain = (Worker(rank, peers, num_samples=12, ahead=by) for rank, by in enumerate((1, 0)))
    for worker in (eager, plain, eager):  # which agree where to begin, and take a batch
        worker.advance()
    samples_per_claim = 3
    assert peers.store.add("claims/given/0", 0) == samples_per_claim * (2 + 1)


@pytest.mark.parametrize("before", [{}, {"epoch": 1, "mega_batch": 1, "untold": 1}])
def test_a_rank_that_joins_makes_up_for_the_merges_that_it_has_missed(
    before: dict[str, int],
) -> None:
    """Mega-batches have ten samples: it comes in when the second of the second epoch is over. Of
    three its scheduler has heard where it comes back with a checkpoint.
    """
    peers = Peers(2)
    policy = Policy(1, peers)
    over = ClaimRound(epoch=1, mega_batch=1, round=4, retry=0, spans=(SampleRange(40, 50),))
    claims = (Claim(over.spans),)
    share = MegaBatchShare(rank=0, claims=claims, updates=1, batch_size=10, busy_s=1.0)
    policy.joined_by = MergedRound(claim_round=over, shares=(share,), ranks=(0, 1))
    loader = DispatchLoader(
        NumbersAhead(30, batches_ahead=0),
        log=ClaimLog(peers.store),
        policy=policy,
        seed=SEED,
        rank=1,
        notify=lambda remark: None,
    )
    assert (loader.epoch, loader.mega_batch) == (1, 2)
    # What a merge calls may look at the loader, which its maker has from now on.
    assert policy.num_merged == 0
    if before:
        loader.load_older_state({"local": before})
    next(loader.one_mega_batch())
    assert loader.num_merged == 3 + 2
    assert policy.num_merged == (2 if before else 5)


class Weighing(Policy):
    """Two merges in a mega-batch of 12 samples, with the weights of updates."""

    @override
    def samples_of_round(self, samples_before: int) -> int | None:
        return 6

    @override
    def end_merge(self) -> MergedRound | None:
        merged = super().end_merge()
        assert merged is not None, "nobody was left out"
        total = sum(share.updates for share in merged.shares)
        shares = [replace(share, weight=share.updates / total) for share in merged.shares]
        return replace(merged, shares=tuple(shares))


@pytest.mark.parametrize("dies", [False, True])
def test_weights_are_those_of_the_merge_that_ends_a_mega_batch(*, dies: bool) -> None:
    """In the merge before it each rank has half of the weight."""
    peers = Peers(2)
    first, second = (
        Worker(rank, peers, num_samples=12, ahead=0, policy=Weighing(rank, peers))
        for rank in range(2)
    )
    # They agree where to begin, take a batch each and merge; then the first one takes the others.
    for worker in (first, second, first, second, first, first):
        worker.advance()
    if dies:
        peers.die(1)
    while not first.loader.last:
        for worker in (first,) if dies else (second, first):
            worker.advance()
    assert {share.rank: share.weight for share in first.loader.last} == {0: 1.0, 1: 0.0}


class Ticking:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self._now_s = count()

    def __call__(self) -> float:
        return next(self._now_s)


@pytest.mark.parametrize(("spare", "said"), [(0, 0), (3, 1)])
def test_waiting_for_data_is_said_once_if_there_is_a_remedy(spare: int, said: int) -> None:
    notices: list[str] = []
    peers = Peers(1)
    loader = DispatchLoader(
        NumbersAhead(48, batches_ahead=1, spare_processes=spare),
        log=ClaimLog(peers.store),
        policy=Policy(0, peers),
        seed=SEED,
        rank=0,
        notify=notices.append,
        clock=Ticking(),
    )
    for _ in loader:
        loader.on_after_step()
    assert len(notices) == said
    assert all("claims_ahead=2" in notice and "of the 4 worker" in notice for notice in notices)


def of_one_rank(now_s: list[float]) -> DispatchLoader:
    """A loader by whose clock it is `now_s[0]`."""
    peers = Peers(1)
    return DispatchLoader(
        NumbersAhead(48, batches_ahead=0),
        log=ClaimLog(peers.store),
        policy=Policy(0, peers),
        seed=SEED,
        rank=0,
        notify=lambda _: None,
        clock=lambda: now_s[0],
    )


def test_time_in_which_a_rank_rests_is_not_what_it_computes() -> None:
    """Of each batch the clock is looked at when it is asked for and when the next one is."""

    def busy_s(*, rests: bool) -> float:
        now_s = [0.0]
        loader = of_one_rank(now_s)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            now_s[0] += 1.0
            if rests:
                loader.on_rest()
                now_s[0] += 100.0
                loader.on_resume()
            now_s[0] += 1.0
            loader.on_after_step()
        next(batches)
        return float(loader.state_dict()["owned"]["computed/0"]["busy_s"])

    assert busy_s(rests=True) == busy_s(rests=False) == 6.0


def test_time_after_a_loop_was_left_is_not_what_a_rank_computes() -> None:
    now_s = [0.0]
    loader = of_one_rank(now_s)
    for _ in range(3):
        for _ in loader:
            now_s[0] += 2.0
            loader.on_after_step()
            break
        now_s[0] += 100.0
    assert loader.state_dict()["owned"]["computed/0"]["busy_s"] == 6.0
