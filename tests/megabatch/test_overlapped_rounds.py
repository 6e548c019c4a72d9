"""Rounds of claims while merges are under way: loaders of several ranks, in threads of which one
runs at a time, in an order that is drawn from a seed. Ranks die and join anywhere, and their peers
hear of one that is to join, each at a time of its own. In some orders claims take long, and are of
several batches. In some the first rounds are steps that ranks take together.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from typing_extensions import override

from offbeat.errors import CheckpointError
from offbeat.megabatch import claims
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
from offbeat.megabatch.loader import DispatchLoader, mega_batch_span, order_of
from offbeat.membership.atomic_group import AtomicGroup

NUM_SAMPLES, SEED = 47, 3


class _DiesError(Exception):
    """The rank's thread ends here."""


class Turns:
    """Lets one of several threads run at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running: set[int] = set()
        self.stuck = False

    def begin(self, rank: int) -> None:
        with self._changed:
            self._running.add(rank)

    def wait(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Let others run, and go on at some time at which `until` holds."""
        with self._changed:
            self._waiting[rank] = until
            self._running.discard(rank)
            self._choose()
            self._changed.wait_for(lambda: rank in self._running or self.stuck)
            if self.stuck:
                raise AssertionError("no rank can go on")

    def end(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            self._choose()

    def _choose(self) -> None:
        if self._running or not self._waiting:
            return
        able = [rank for rank, until in sorted(self._waiting.items()) if until()]
        if able:
            chosen = self.random.choice(able)
            del self._waiting[chosen]
            self._running.add(chosen)
        else:
            self.stuck = True
        self._changed.notify_all()


@dataclass
class Merge:
    """What ranks propose, and what came of it once all that live have proposed."""

    proposals: dict[int, Any] = field(default_factory=dict)
    outcome: Any = None


class Run:
    """What all ranks share."""

    def __init__(self, seed: int, size: int) -> None:
        self.turns = Turns(seed)
        # Or the merges of whole mega-batches alone.
        self.overlaps_all = seed % 4 < 2
        self.claims_take_long = seed % 8 >= 4
        self.steps_together = seed % 3 > 0
        self.store = HashStore()
        self.living = set(range(size))
        self.joining: set[int] = set()
        self.is_over = False
        self.merges: list[Merge] = [Merge()]
        self.rounds: list[MergedRound] = []
        self.num_steps = 0
        self.awaited: set[int] = set()  # steps at which a rank waits to join, by number

    def propose(self, rank: int, number: int, proposal: Any) -> None:
        while len(self.merges) <= number:
            self.merges.append(Merge())
        self.merges[number].proposals[rank] = proposal
        self.conclude()

    def conclude(self) -> None:
        for merge in self.merges:
            if merge.outcome is None and self.living and self.living <= merge.proposals.keys():
                alive = {rank: merge.proposals[rank] for rank in sorted(self.living)}
                kinds = {proposal[0] for proposal in alive.values()}
                assert len(kinds) == 1, kinds
                merge.outcome = alive if kinds == {"agree"} else self._merged(alive, *kinds)

    def _merged(self, alive: Mapping[int, Any], kind: str) -> MergedRound:
        ((claim_round, following),) = {proposal[2:] for proposal in alive.values()}
        if kind == "step":
            self.num_steps += 1
            if self.joining:
                self.awaited.add(sum(each.outcome is not None for each in self.merges))
        else:
            self.living |= self.joining
            self.joining = set()
        shares = tuple(proposal[1] for proposal in alive.values())
        ranks = tuple(sorted(self.living))
        self.rounds.append(
            MergedRound(claim_round=claim_round, shares=shares, ranks=ranks, following=following)
        )
        return self.rounds[-1]

    def die(self, rank: int) -> None:
        """What it proposed for a merge that is not over is not in it."""
        self.living.discard(rank)
        self.joining.discard(rank)
        for merge in self.merges:
            merge.proposals.pop(rank, None)
        self.conclude()


class Group(AtomicGroup):
    """The members, as the policy of one of them knows them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def is_new(self) -> bool:  # type: ignore[override]
        return self._policy.was_stopped

    @property
    def has_newcomers(self) -> bool:  # type: ignore[override]
        run = self._policy.run
        return bool(run.joining) and run.turns.random.random() < 0.5


class Policy(MegaBatchCallback):
    """Merges nothing, and may take its time to notice that a merge is over."""

    def __init__(self, run: Run, rank: int, *, warmup: bool, dies: float) -> None:
        self.run, self.rank, self.warmup, self.dies = run, rank, warmup, dies
        self.group, self.device = Group(self), torch.device("cpu")
        self.shares_equally = False
        self.batch_sizes = (2,) * len(run.living)
        self.may_step = True
        self.ranks = tuple(sorted(run.living))
        self.joined_by: MergedRound | None = None
        self.told = self.num_taken = 0
        self.computed: list[int] = []
        self.was_stopped = False
        self._number = 0
        self._under_way = False

    def join(self) -> MergedRound:
        run = self.run
        run.joining.add(self.rank)
        run.turns.wait(self.rank)
        if run.turns.random.random() < self.dies:
            raise _DiesError
        run.turns.wait(self.rank, lambda: self.rank in run.living or run.is_over)
        if self.rank not in run.living:
            raise _DiesError
        # Whatever was merged when it came in is the last merge that is over.
        self._number = max(n for n, each in enumerate(run.merges) if each.outcome) + 1
        self.was_stopped, self.computed = False, []
        return self._adopt(run.merges[self._number - 1].outcome)

    def stop(self) -> None:
        """It is stopped for so long that its peers go on without it."""
        self.run.die(self.rank)
        self.was_stopped = True

    @override
    def overlaps_merge(self, *, is_whole: bool) -> bool:
        return is_whole or self.run.overlaps_all

    @property
    @override
    def samples_of_mega_batch(self) -> int:
        return 16

    @property
    @override
    def smallest_claim(self) -> int:
        return 1

    @property
    @override
    def batch_size(self) -> int:
        return 1 + self.rank % 3

    @property
    @override
    def largest_batch(self) -> int:
        return 4

    @override
    def gather(self, value: Any) -> Mapping[int, Any]:
        outcome = self._met(("agree", value))
        self.ranks = tuple(sorted(outcome))
        return {rank: proposal[1] for rank, proposal in outcome.items()}

    @override
    def samples_of_round(self, samples_before: int) -> int | None:
        return 2 * len(self.ranks) if self.warmup and samples_before < 30 else None

    @override
    def steps_together(self, samples_before: int, num_samples: int) -> bool:
        is_first = self.run.steps_together and self.may_step and samples_before < 20
        return self.warmup and is_first and num_samples == sum(self.batch_sizes)

    @override
    def step_together(
        self, share: MegaBatchShare, claim_round: ClaimRound, *, takes_step: bool
    ) -> MergedRound | None:
        # Whoever waits to join does so by a merge of models, which is the next round's.
        self.begin_merge(share, claim_round, None, kind="step")
        merged = self.end_merge()
        self.may_step = merged is None or self._number - 1 not in self.run.awaited
        return merged

    @override
    def batch_handed_out(self, num_samples: int) -> None: ...

    @override
    def mega_batches_merged(self, count: int) -> None:
        assert count >= 0
        self.told += count

    @override
    def begin_merge(
        self,
        share: MegaBatchShare,
        claim_round: ClaimRound,
        following: ClaimRound | None,
        *,
        kind: str = "merge",
    ) -> None:
        assert not self._under_way
        self.may_step = True
        self._under_way = not self.was_stopped
        if self._under_way:
            self._check(share)
            self._propose((kind, share, claim_round, following))

    @property
    @override
    def merge_is_over(self) -> bool:
        return self._under_way and self._is_over() and self.run.turns.random.random() < 0.5

    @property
    @override
    def merge_is_taken(self) -> bool:
        return False

    @override
    def end_merge(self) -> MergedRound | None:
        was_proposed, self._under_way = self._under_way, False
        outcome = self.run.merges[self._number - 1].outcome if was_proposed else None
        if self.was_stopped and (
            outcome is None or self.rank not in [each.rank for each in outcome.shares]
        ):
            self.joined_by = self.join()
            return None
        return self._adopt(self._wait())

    def _adopt(self, merged: MergedRound) -> MergedRound:
        self.num_taken += 1
        self.ranks = merged.ranks
        self.batch_sizes = (2,) * len(self.ranks)
        return merged

    def _met(self, proposal: Any) -> Any:
        assert not self._under_way
        self._propose(proposal)
        return self._wait()

    def _propose(self, proposal: Any) -> None:
        self.run.propose(self.rank, self._number, proposal)
        self._number += 1

    def _is_over(self) -> bool:
        return self.run.merges[self._number - 1].outcome is not None

    def _wait(self) -> Any:
        self.run.turns.wait(self.rank, self._is_over)
        return self.run.merges[self._number - 1].outcome

    def _check(self, share: MegaBatchShare) -> None:
        """What it says that it has computed are the samples that it was given."""
        claimed = [sample for claim in share.claims for sample in samples_of(claim)]
        assert Counter(sample % NUM_SAMPLES for sample in claimed) == Counter(
            sample % NUM_SAMPLES for sample in self.computed
        )
        self.computed = []


def samples_of(claim: Claim) -> list[int]:
    """As numbers that no other pass has."""
    return [
        NUM_SAMPLES * number + int(order_of(NUM_SAMPLES, seed=SEED, epoch=number)[place])
        for span in claim.spans
        for position in range(*span)
        for number, place in [divmod(position, NUM_SAMPLES)]
    ]


class Numbers(Fetcher):
    """A batch is its samples' numbers."""

    num_samples, batches_ahead = NUM_SAMPLES, 0

    @override
    def batches(self, numbers: Iterable[list[int]], *, epoch: int) -> Iterator[Any]:
        return iter(numbers)


class Trainer:
    """One rank's loop, in a thread of its own."""

    def __init__(
        self,
        run: Run,
        rank: int,
        body: Callable[[Trainer], None],
        *,
        at_batch: Callable[[Trainer], None] = lambda _: None,
        **how: Any,
    ) -> None:
        self.run, self.rank, self.how = run, rank, how
        self.at_batch, self.num_batches = at_batch, 0
        self.error: BaseException | None = None
        self.policy = Policy(run, rank, warmup=how["warmup"], dies=how["dies"])
        self.loader: DispatchLoader | None = None
        self._body = body
        self.thread = threading.Thread(target=self._run)
        run.turns.begin(rank)

    def make_loader(self) -> DispatchLoader:
        self.loader = DispatchLoader(
            Numbers(),
            log=ClaimLog(self.run.store),
            policy=self.policy,
            seed=SEED,
            rank=self.rank,
            notify=lambda _: None,
            clock=count().__next__ if self.run.claims_take_long else lambda: 0.0,
        )
        return self.loader

    def _run(self) -> None:
        try:
            self.run.turns.wait(self.rank)
            self._body(self)
        except _DiesError:
            self.run.die(self.rank)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            self.run.turns.end(self.rank)


def train(trainer: Trainer, *, passes: int = 3) -> None:
    """Batches of some passes, by pass or by mega-batch; it may die in each of them."""
    how, run, loader = trainer.how, trainer.run, trainer.loader
    if loader is None:
        if trainer.rank not in run.living:
            trainer.policy.joined_by = trainer.policy.join()
        loader = trainer.make_loader()
    while loader.epoch < passes:
        last = passes * loader.num_mega_batches - 1
        batches = (
            loader if how["by_pass"] else loader.one_mega_batch(goes_on=loader.num_merged < last)
        )
        for batch in batches:
            run.turns.wait(trainer.rank)
            if trainer.policy.was_stopped or len(run.living) < 2:
                pass
            elif run.turns.random.random() < how["dies"]:
                raise _DiesError
            elif run.turns.random.random() < how["stops"]:
                trainer.policy.stop()
            trainer.policy.computed += batch
            trainer.num_batches += 1
            loader.on_before_update()
            loader.on_after_step()
            trainer.at_batch(trainer)
    run.is_over = True


def go(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        trainer.thread.start()
    for trainer in trainers:
        trainer.thread.join()
    for trainer in trainers:
        if trainer.error is not None:
            raise trainer.error


def merged_samples(rounds: Iterable[MergedRound]) -> Counter[int]:
    return Counter(
        sample for merged in rounds for claim in merged.claims for sample in samples_of(claim)
    )


def whole_of(claim_round: ClaimRound) -> SampleRange:
    first = claim_round.epoch * NUM_SAMPLES
    begin, end = mega_batch_span(NUM_SAMPLES, 16, claim_round.mega_batch)
    return SampleRange(first + begin, first + end)


@pytest.mark.parametrize("by_pass", [True, False])
@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_every_sample_is_merged_once_in_whatever_order_ranks_go(
    seed: int, *, warmup: bool, by_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker may claim all that is left, since these mega-batches are small.
    monkeypatch.setattr(claims, "SHARE_OF_REST", float(1 + seed % 4))
    size, joins = 1 + seed % 4, seed % 3
    run = Run(seed, size)
    faults = {"dies": (0.0, 0.03, 0.1)[seed % 3], "stops": (0.0, 0.1)[seed % 2]}
    how = {"warmup": warmup, "by_pass": by_pass} | faults
    trainers = [Trainer(run, rank, train, **how) for rank in range(size + joins)]
    go(trainers)
    assert merged_samples(run.rounds) == Counter(range(3 * NUM_SAMPLES))
    if run.overlaps_all or not faults["stops"]:  # Else every mega-batch may be merged by parts.
        assert any(merged.following for merged in run.rounds)
    if not run.overlaps_all:
        beside = [merged.claim_round for merged in run.rounds if merged.following]
        assert all(over.spans == (whole_of(over),) and not over.later for over in beside)
    for rank in run.living:
        assert trainers[rank].policy.told == 9
    assert bool(run.num_steps) == (warmup and run.steps_together)


@pytest.mark.parametrize("by_pass", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_was_saved_in_a_merge_sees_the_rest_once(seed: int, *, by_pass: bool) -> None:
    """Unless only some of the ranks had the merged model by then."""
    run, resumed = Run(seed, 3), Run(seed + 100, 3)
    states: dict[int, Any] = {}
    told: dict[int, int] = {}
    num_taken: set[int] = set()

    def save(trainer: Trainer) -> None:
        if trainer.rank or trainer.num_batches != 5 + seed:
            return
        for each in trainers:
            assert each.loader is not None
            states[each.rank] = copy.deepcopy(each.loader.state_dict())
            told[each.rank] = each.policy.told
            num_taken.add(each.policy.num_taken)

    how = {"warmup": False, "by_pass": by_pass, "dies": 0.0, "stops": 0.0}
    trainers = [Trainer(run, rank, train, at_batch=save, **how) for rank in range(3)]
    go(trainers)
    again = [Trainer(resumed, rank, train, **how) for rank in range(3)]
    for trainer in again:
        trainer.make_loader().load_state_dict(states[trainer.rank])
        (saved,) = states[trainer.rank]["owned"].values()
        claims = [Claim(tuple(SampleRange(*s) for s in spans)) for spans in saved["claims"]]
        trainer.policy.computed = [sample for claim in claims for sample in samples_of(claim)]
    if len(num_taken) > 1:
        with pytest.raises(CheckpointError, match="or after different merges"):
            go(again)
        return
    go(again)
    before = merged_samples(run.rounds[: num_taken.pop()])
    assert before + merged_samples(resumed.rounds) == Counter(range(3 * NUM_SAMPLES))
    assert [told[rank] + again[rank].policy.told for rank in range(3)] == [9, 9, 9]
