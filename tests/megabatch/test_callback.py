"""Parts whose ranks are threads: which batch sizes come of mega-batches in which a rank comes in
late, was left out, or is resumed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.distributed import HashStore

from offbeat.callbacks.context import Context, Notices
from offbeat.megabatch.batch_sizes import RateScaling
from offbeat.megabatch.callback import MegaBatchCallback, MegaBatchPlan, ScaledLearningRate
from offbeat.megabatch.claims import ClaimRound, MegaBatchShare, SampleRange
from offbeat.membership.agreement import Generation, Member
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.transport.driver import Driver, Stream
from offbeat.weights.model_weights import BufferNames, ModelWeights
from thread_support.world import ThreadDriver, results_of


class Run:
    """Ranks that merge when they are told to, after as many updates as they are told; or, where no
    loader `feeds` them, as their own loops step.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        scaling: RateScaling = "auto",
        kind: str = "SGD",
        feeds: bool = True,
    ) -> None:
        self.callbacks: dict[int, MegaBatchCallback] = {}
        self.groups: dict[int, AtomicGroup] = {}
        self.notices = Notices(rank=0)
        self.told: list[int] = []  # a rank for each mega-batch that it hears of
        self._scaling, self._kind, self._feeds = scaling, kind, feeds
        self._store = HashStore()
        self._numbers = itertools.count()
        self.begin(ranks)

    def begin(
        self, ranks: Sequence[int], *, updates: Mapping[int, int] | None = None, ends: bool = False
    ) -> None:
        """A generation begins; who is new in it comes in by a merge, for which its peers have made
        `updates`.
        """
        new = [rank for rank in ranks if self._is_new(rank)] if self.callbacks else []
        generation = Generation(
            number=next(self._numbers),
            members=tuple(Member(rank, 0) for rank in ranks),
            newcomers=frozenset(map(ranks.index, new)),
            tickets=0,
        )

        def begin(driver: ThreadDriver) -> None:
            rank = ranks[driver.rank]
            if rank not in self.groups:
                self.groups[rank] = AtomicGroup(
                    self._store, count=lambda driver: driver, notify=self.notices.notify
                )
            self.groups[rank].begin(generation, driver.rank, driver)
            if rank not in self.callbacks:
                self.callbacks[rank] = self._callback(rank, len(ranks))
                if self._feeds:
                    self.callbacks[rank].feed(4, dict.fromkeys(ranks))
            elif new and self._feeds:
                self._merge(rank, (updates or {}).get(rank, 0), ends)

        results_of(len(ranks), begin)

    def _is_new(self, rank: int) -> bool:
        return rank not in self.callbacks or self.callbacks[rank].group.is_new

    def merge(self, updates: Mapping[int, int], *, ends: bool = False) -> None:
        """A round is over, and with it the mega-batch if it `ends`."""
        ranks = sorted(updates)
        results_of(
            len(ranks),
            lambda driver: self._merge(ranks[driver.rank], updates[ranks[driver.rank]], ends),
        )

    def _merge(self, rank: int, updates: int, ends: bool) -> None:
        callback = self.callbacks[rank]
        share = MegaBatchShare(
            rank=rank, claims=(), updates=updates, batch_size=callback.batch_size, busy_s=0.0
        )
        later = () if ends else (SampleRange(1, 2),)
        claim_round = ClaimRound(
            epoch=0, mega_batch=0, round=0, retry=0, spans=(SampleRange(0, 1),), later=later
        )
        callback.begin_merge(share, claim_round, None)
        callback.end_merge()

    def _callback(self, rank: int, world_size: int) -> MegaBatchCallback:
        weight = torch.nn.Parameter(torch.ones(2))
        context = Context(
            parameters={"weight": weight},
            driver=cast(Driver, SimpleNamespace(rank=rank, world_size=world_size)),
            new_stream=lambda: Stream(0),
            notices=self.notices,
            optimizer=getattr(torch.optim, self._kind)([weight], lr=0.1),
            on_merge=[lambda: self.told.append(rank)],
        )
        return MegaBatchCallback(
            context,
            ModelWeights(parameters={"weight": weight}, buffers=dict, chosen=BufferNames()),
            plan=MegaBatchPlan(
                mega_batch=250,
                rule="proportional",
                smallest=1,
                warmup=1,
                rate_scaling=self._scaling,
            ),
            group=self.groups[rank],
        )

    def step(self, steps: Mapping[int, int]) -> None:
        """Each rank takes as many steps of its own loop as `steps` says."""
        ranks = sorted(steps)

        def loop(driver: ThreadDriver) -> None:
            rank = ranks[driver.rank]
            for _ in range(steps[rank]):
                self.callbacks[rank].on_after_step()

        results_of(len(ranks), loop)

    def sizes(self) -> list[tuple[int, ...]]:
        return [callback.batch_sizes for _, callback in sorted(self.callbacks.items())]


def everyone(updates: int, ranks: int = 3) -> dict[int, int]:
    return dict.fromkeys(range(ranks), updates)


def test_one_that_joins_within_a_mega_batch_does_not_look_slow() -> None:
    """It comes in after round 6 of 8. All make one update a round."""
    run = Run([0, 1])
    for _ in range(5):
        run.merge(everyone(1, ranks=2))
    run.begin([0, 1, 2], updates=everyone(1))
    run.merge(everyone(1))
    run.merge(everyone(1), ends=True)
    assert run.sizes() == [(4, 4, 4)] * 3
    run.merge({0: 1, 1: 2, 2: 3}, ends=True)  # The next one it computes from its beginning.
    assert run.sizes() == [(2, 4, 6)] * 3


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_was_left_out_does_not_count_what_it_had_done_before(ends: bool) -> None:
    """It comes back by a merge within the next mega-batch, or at the end of it."""
    run = Run([0, 1, 2])
    run.merge({0: 1, 1: 1, 2: 9})
    run.groups[2].expelled()
    run.begin([0, 1])
    run.merge(everyone(1, ranks=2), ends=True)
    run.merge(everyone(1, ranks=2))
    run.begin([0, 1, 2], updates=everyone(1), ends=ends)
    if not ends:
        run.merge(everyone(1), ends=True)
    assert run.sizes() == [(4, 4, 4)] * 3


def test_one_that_was_left_out_counts_mega_batches_and_not_each_merge_that_it_has_missed() -> None:
    """Loops of the ranks' own merge after one step, one more, three more and six more. No
    mega-batch ends then, which has 83 steps of three ranks.
    """
    run = Run([0, 1, 2], feeds=False)
    run.step(everyone(2))
    run.groups[2].expelled()
    run.begin([0, 1])
    run.step(everyone(3, ranks=2))
    run.begin([0, 1, 2])
    run.step({0: 6, 1: 6, 2: 1})
    states = [callback.state_dict()["replicated"] for callback in run.callbacks.values()]
    assert [(state["num_merges"], state["merged_at"]) for state in states] == [(4, 11)] * 3
    assert not run.told


@pytest.mark.parametrize("lost", [(), ("updates", "busy_s", "missed_rounds")], ids=["new", "old"])
def test_a_run_that_was_saved_between_two_rounds_counts_both(lost: Sequence[str]) -> None:
    """Alone, the second would say nothing. An older checkpoint does not have the first."""
    run = Run([0, 1])
    run.merge({0: 3, 1: 1})
    states = copy.deepcopy(
        {rank: callback.state_dict() for rank, callback in run.callbacks.items()}
    )
    resumed = Run([0, 1])
    for rank, callback in resumed.callbacks.items():
        for name in lost:
            del states[rank]["local"][name]
        callback.load_state_dict(states[rank])
    for each in (run, resumed):
        each.merge({0: 2, 1: 2}, ends=True)
    assert run.sizes() == [(5, 3)] * 2
    assert resumed.sizes() == ([(4, 4)] * 2 if lost else run.sizes())


def test_one_that_joins_a_resumed_run_is_as_far_in_it_as_its_peers() -> None:
    run = Run([0, 1])
    for callback in run.callbacks.values():
        state = callback.state_dict()
        callback.load_state_dict(state | {"replicated": state["replicated"] | {"merged_at": 11}})
    run.begin([0, 1, 2], updates=everyone(1))
    states = [callback.state_dict() for callback in run.callbacks.values()]
    assert [state["replicated"]["merged_at"] for state in states] == [11] * 3


@pytest.mark.parametrize(
    ("scaling", "kind", "said"),
    [
        ("auto", "SGD", None),
        ("linear", "AdamW", None),
        ("auto", "AdamW", "since AdamW takes shorter steps with a rank's own gradients"),
        ("sqrt", "SGD", "x batch / 4), as rate_scaling='sqrt' says"),
    ],
)
def test_why_learning_rates_are_scaled_is_said(
    scaling: RateScaling, kind: str, said: str | None
) -> None:
    run = Run([0, 1], scaling=scaling, kind=kind)
    assert [said in notice for notice in run.notices.kept if said] == [True, True] * bool(said)
    assert said or not run.notices.kept


@pytest.mark.parametrize(
    ("kind", "scaling"), [("AdamW", "auto"), ("Adafactor", "auto"), ("Muon", "sqrt")]
)
def test_decoupled_decay_does_not_follow_the_rate(kind: str, scaling: RateScaling) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, weight_decay=0.5)
    (group,) = optimizer.param_groups
    rate = ScaledLearningRate(optimizer, scaling)
    rate.scale(8, 4, 8)
    assert group["lr"] == pytest.approx(0.2)
    assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 * 0.5)
    rate.restore()
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.5)
