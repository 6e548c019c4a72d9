"""Merges: what is averaged, with which weights, and who commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from offbeat.codec.topk_codec import AllChanges, WeightCodec
from offbeat.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NonFiniteError,
    OffbeatError,
    PeerError,
    WireError,
)
from offbeat.megabatch.batch_sizes import merge_weights, normalised, perturbed
from offbeat.megabatch.claims import ClaimRound, MegaBatchShare, SampleRange
from offbeat.megabatch.coded_merge import MergedChanges
from offbeat.megabatch.merge import MergeOutcome, MergeProtocol, ModelSnapshot
from offbeat.megabatch.merge_momentum import MergeMomentum
from offbeat.megabatch.proposal import MergeProposal, ProposalKind, TrainerReport, agreed_kind
from offbeat.membership.agreement import Generation, Member
from offbeat.membership.atomic_group import AtomicGroup, GroupWork
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Counting, Ticket, Wrapper
from offbeat.transport.operations import Collective, Operation
from offbeat.weights.model_weights import ModelWeights, choose_buffers
from offbeat.weights.optimizer_state import OptimizerStates

# A merge among virtual ranks: what members conclude from their proposals, what they are left
# with, and how one that is new comes in.


def report_of(rank: int, *, updates: int = 0, since_merge: int = 0) -> TrainerReport:
    share = MegaBatchShare(rank=rank, claims=(), updates=updates, batch_size=1, busy_s=0.0)
    return TrainerReport(
        share=share, claim_round=None, memory_limit=None, num_steps=0, since_merge=since_merge
    )


def proposal(
    kind: ProposalKind, *, rank: int = 0, is_new: bool = False, payload: str = ""
) -> MergeProposal:
    return MergeProposal(
        kind=kind,
        is_new=is_new,
        report=report_of(rank),
        num_merges=0,
        rows_known_since=None,
        sparse=(),
        touched=((0, 3),),
        payload=payload,
    )


def test_a_proposal_arrives_as_it_was() -> None:
    sent = proposal("agree", rank=2, payload='{"fits": null}')
    assert MergeProposal.from_bytes(sent.to_bytes()) == sent
    for damaged in (b"{}", b"[]", b"1", sent.to_bytes()[:-1]):
        with pytest.raises(WireError, match="is damaged"):
            MergeProposal.from_bytes(damaged)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (
            ["merge", "mean"],
            r"ranks \[0\] merge while ranks \[1\] call averaged_model\(\); do the same",
        ),
        (
            ["agree", "finish", "mean"],
            r"ranks \[2\] call averaged_model\(\) while ranks \[0\] begin with a loader",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(kinds: list[ProposalKind], said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        agreed_kind([proposal(kind, rank=rank) for rank, kind in enumerate(kinds)])


@pytest.mark.parametrize("kind", ["merge", "mean", "agree"])
def test_who_has_finished_or_is_new_follows_its_peers(kind: ProposalKind) -> None:
    peers = [proposal("finish", rank=1), proposal("merge", rank=2, is_new=True)]
    assert agreed_kind([proposal(kind), *peers]) == kind
    assert agreed_kind(peers) == "finish"
    assert agreed_kind(peers[1:]) is None


class VirtualGroup:
    """In the place of an `AtomicGroup`: keeps the work, for a virtual rank to carry out, and then
    returns its outcome. Commits always succeed.
    """

    def __init__(self, *, is_new: bool) -> None:
        self.is_new = is_new
        self.work: GroupWork[MergeOutcome] | None = None
        self.outcomes: list[MergeOutcome] = []

    def run(self, work: GroupWork[MergeOutcome]) -> MergeOutcome:
        if self.outcomes:
            return self.outcomes.pop(0)
        self.work = work
        raise _NotCarriedOutError

    def caught_up(self, generation: Generation) -> None:
        self.is_new = False


class _NotCarriedOutError(Exception):
    """The work waits for its virtual rank."""


class Rank:
    """A model of 20 x 3 sparse rows, two dense weights and a counter, and its protocol."""

    def __init__(
        self,
        number: int,
        *,
        is_new: bool,
        gamma: float = 0.0,
        codec: WeightCodec | None = None,
        make: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, momentum=0.9),
    ) -> None:
        self.number = number
        self.rows = torch.nn.Parameter(torch.full((20, 3), float(number)))
        self.dense = torch.nn.Parameter(torch.full((2,), 10.0 * number, dtype=torch.bfloat16))
        self.count = torch.tensor([number])
        parameters = {"rows": self.rows, "dense": self.dense}
        buffers = {"count": self.count}
        self.parameters = parameters
        self.weights = ModelWeights(
            parameters=parameters, buffers=lambda: buffers, chosen=choose_buffers(buffers)
        )
        self.optimizer = make(parameters.values(), lr=0.1)
        self.group = VirtualGroup(is_new=is_new)
        has_momentum = gamma or codec is not None
        self.momentum = MergeMomentum(parameters, gamma=gamma) if has_momentum else None
        self.changes = None if codec is None else MergedChanges(parameters, codec)
        self.protocol = protocol_of(self)

    @property
    def state(self) -> tuple[list[list[float]], list[float], int]:
        return self.rows.tolist(), self.dense.tolist(), int(self.count)

    @property
    def velocities(self) -> list[list[float]]:
        velocity: torch.Tensor = self.optimizer.state[self.rows]["momentum_buffer"]
        return velocity.to_dense().tolist()

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:
        return list(self.optimizer.state.values())

    def begin_at_zero(self) -> None:
        self.rows.detach().zero_()
        self.dense.detach().zero_()

    def step(self, gradient: torch.Tensor) -> None:
        self.rows.grad = gradient
        self.optimizer.step()

    def set_sparse_gradient(self, row: int | None = None) -> None:
        self.rows.grad = torch.sparse_coo_tensor(
            torch.tensor([[self.number if row is None else row]]),
            torch.ones(1, 3),
            self.rows.shape,
            check_invariants=True,
        )
        self.protocol.rows.note_sparse_gradients()

    def carry_out(self, call: Callable[[], Any], generation: Generation) -> Collective[Any]:
        """What `call`, of the protocol, returns."""
        done: list[MergeOutcome] = []
        model = self.rows.detach(), self.dense.detach(), self.count
        before = [tensor.clone() for tensor in model]
        while True:
            # The call begins anew, and takes over once more what was done.
            for tensor, value in zip(model, before, strict=True):
                tensor.copy_(value)
            self.group.outcomes = list(done)
            try:
                return call()
            except _NotCarriedOutError:
                assert self.group.work is not None
                done.append((yield from self.group.work(generation, self.number)))


def protocol_of(rank: Rank) -> MergeProtocol:
    return MergeProtocol(
        rank.weights,
        group=cast(AtomicGroup, rank.group),
        weigh=lambda proposals: [each.report.share.updates for each in proposals],
        momentum=rank.momentum,
        rank=rank.number,
        states=OptimizerStates(rank.optimizer, list(rank.parameters.values())),
        changes=rank.changes,
    )


def make_ranks(size: int, *, new: Sequence[int] = (), **options: Any) -> list[Rank]:
    return [Rank(number, is_new=number in new, **options) for number in range(size)]


class Dying(Wrapper):
    """Fails with its third operation, which is within the exchange of models."""

    operations = 0

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        self.operations += 1
        if self.operations == 3:
            raise PeerError("the rank dies")
        return super().start(operation, channel)


def together(
    ranks: Sequence[Rank], calls: Sequence[Callable[[], Any]], *, dies: int | None = None
) -> tuple[list[Any], int]:
    """What the ranks' calls return, or raise, and how many bytes were sent."""
    generation = Generation(
        number=0,
        members=tuple(Member(rank.number, 0) for rank in ranks),
        newcomers=frozenset(),
        tickets=0,
    )
    cluster = VirtualCluster(len(ranks))
    drivers: list[Counting] = []

    def wrap(driver: Any) -> Counting:
        drivers.append(Counting(Dying(driver) if driver.rank == dies else driver))
        return drivers[-1]

    outcomes = cluster.outcomes(
        [rank.carry_out(call, generation) for rank, call in zip(ranks, calls, strict=True)],
        wrap=wrap,
    )
    return outcomes, sum(driver.traffic.bytes_sent for driver in drivers)


def merging(ranks: Sequence[Rank], updates: Sequence[int]) -> list[Callable[[], MergeOutcome]]:
    def call_of(rank: Rank, number: int) -> Callable[[], MergeOutcome]:
        return lambda: rank.protocol.merge(report_of(rank.number, updates=number, since_merge=1))

    return [call_of(rank, number) for rank, number in zip(ranks, updates, strict=True)]


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_a_merge_leaves_all_members_with_the_weighted_mean(gamma: float) -> None:
    ranks = make_ranks(4, new=[2], gamma=gamma)
    outcomes, _ = together(ranks, merging(ranks, [1, 3, 7, 0]))
    assert [outcome.mean.weights for outcome in outcomes] == [[1, 3, 0, 0]] * 4
    assert ranks[0].rows.unique().tolist() == [0.75]
    assert ranks[0].dense.tolist() == [7.5, 7.5]
    assert int(ranks[0].count) == 3
    assert all(rank.state == ranks[0].state for rank in ranks)
    assert not any(rank.group.is_new for rank in ranks)
    assert [rank.protocol.num_merges for rank in ranks] == [1] * 4


def counted_in_a_copy(
    rank: Rank, *, since_merge: int = 1
) -> tuple[partial[MergeOutcome], torch.Tensor]:
    """A call for the mean of all models, and the counter of the copy that has it afterwards."""
    count = torch.zeros_like(rank.count)
    copy = replace(
        rank.weights,
        parameters={name: each.detach().clone() for name, each in rank.parameters.items()},
        buffers=lambda: {"count": count},
    )
    report = report_of(rank.number, since_merge=since_merge)
    return partial(rank.protocol.mean_into, copy, report), count


def test_the_mean_for_a_copy_counts_as_a_merge_does() -> None:
    """The largest that a rank has counted itself, and not more than any of them has."""
    ranks = make_ranks(2)
    together(ranks, merging(ranks, [1, 1]))
    for rank, more in zip(ranks, (3, 1), strict=True):
        rank.count += more
    calls, counts = zip(*map(counted_in_a_copy, ranks), strict=True)
    together(ranks, calls)
    assert [int(count) for count in counts] == [3, 3]


def test_a_copy_from_before_a_merge_that_went_on_has_what_came_of_it() -> None:
    """As one has that a loop asks for after its last batch, while the models are being merged."""
    ranks = make_ranks(2)
    snapshots = freeze(ranks, [1, 3])
    calls, counts = zip(*(counted_in_a_copy(rank, since_merge=0) for rank in ranks), strict=True)
    copies = [call.args[0].parameters for call in calls]
    merge_beside(ranks, snapshots)
    together(ranks, calls)
    assert [copy["rows"].unique().tolist() for copy in copies] == [[0.75]] * 2
    assert [copy["dense"].tolist() for copy in copies] == [[7.5, 7.5]] * 2
    assert [int(count) for count in counts] == [1, 1]


def test_one_that_is_new_has_what_its_peers_have_counted_in_its_copy_too() -> None:
    ranks = make_ranks(3, new=[1])
    call, count = counted_in_a_copy(ranks[1])
    first, _, last = merging(ranks, [1, 1, 1])
    together(ranks, [first, call, last])
    assert int(count) == 2


def test_one_that_joins_goes_on_with_the_momentum_of_its_peers() -> None:
    ranks = make_ranks(3, new=[1], gamma=0.5)
    momenta = [rank.momentum for rank in ranks if rank.momentum is not None]
    for rank, momentum in zip(ranks, momenta, strict=True):
        rank.rows.detach().zero_()
        rank.dense.detach().zero_()
        momentum.begin()
    together(ranks, merging(ranks, [1, 1, 1]))
    for _ in range(2):
        ranks[0].rows.detach().add_(1.0)
        together(ranks, merging(ranks, [1, 1, 1]))
        assert all(rank.state == ranks[0].state for rank in ranks)
    states = [{key: each.tolist() for key, each in m.state().items()} for m in momenta]
    assert states[0] == states[1] == states[2]


def test_one_that_comes_back_goes_on_with_the_momentum_of_its_peers_and_not_with_its_own() -> None:
    """Rank 2 is left out after the second merge, and has the model from the fifth."""
    ranks = make_ranks(3, gamma=0.5)
    momenta = [rank.momentum for rank in ranks if rank.momentum is not None]
    for rank, momentum in zip(ranks, momenta, strict=True):
        rank.begin_at_zero()
        momentum.begin()
    for here in (ranks, ranks, ranks[:2], ranks[:2], ranks):
        ranks[2].group.is_new = len(here) < 3 or ranks[2].group.is_new
        for rank in ranks:
            rank.rows.detach().add_(1.0 + rank.number)
        together(here, merging(here, [1] * len(here)))
        assert all(rank.state == ranks[0].state for rank in here)
    states = [{key: each.tolist() for key, each in m.state().items()} for m in momenta]
    assert states[0] == states[1] == states[2]


def test_a_rank_without_a_batch_goes_on_with_the_momentum_of_its_peers() -> None:
    """Rank 0 had none in the first mega-batch, so nobody told it that one began; rank 2 is new."""
    ranks = make_ranks(3, new=[2], gamma=0.5)
    momenta = [rank.momentum for rank in ranks if rank.momentum is not None]
    for rank in ranks:
        rank.rows.detach().zero_()
        rank.dense.detach().zero_()
    momenta[1].begin()
    for _ in range(3):
        ranks[1].rows.detach().add_(1.0)
        together(ranks, merging(ranks, [0, 1, 0]))
        assert all(rank.state == ranks[0].state for rank in ranks)
    states = [{key: each.tolist() for key, each in m.state().items()} for m in momenta]
    assert states[0] == states[1] == states[2]


def test_only_rows_that_changed_are_sent_and_all_ranks_hold_the_same() -> None:
    ranks = make_ranks(2)
    for rank in ranks:
        rank.set_sparse_gradient()
    _, whole = together(ranks, merging(ranks, [1, 1]))
    ranks[0].rows.detach()[4] += 2
    ranks[1].rows.detach()[5] -= 4
    _, some = together(ranks, merging(ranks, [1, 1]))
    assert ranks[0].rows[3:7, 0].tolist() == [0.5, 1.5, -1.5, 0.5]
    assert ranks[0].state == ranks[1].state
    assert whole - some > 20 * 3 * 4 // 2  # of 20 rows in float32, each rank sends half


def test_merged_after_every_update_with_its_momentum_it_is_s_sgd() -> None:
    ranks = make_ranks(3)
    alone = Rank(0, is_new=False)
    for rank in (*ranks, alone):
        rank.begin_at_zero()
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        gradients = torch.randn(3, 20, 3, generator=generator)
        alone.step(gradients.mean(dim=0))
        for rank, gradient in zip(ranks, gradients, strict=True):
            rank.step(gradient)
        together(ranks, merging(ranks, [1, 1, 1]))
        assert all(rank.velocities == ranks[0].velocities for rank in ranks)
    torch.testing.assert_close(ranks[2].rows, alone.rows)
    torch.testing.assert_close(torch.tensor(ranks[2].velocities), torch.tensor(alone.velocities))


def test_of_momenta_too_only_rows_that_changed_are_sent() -> None:
    ranks = make_ranks(2)
    sent = []
    for row in (3, 3, 4):
        for rank in ranks:
            rank.set_sparse_gradient(row + rank.number)
            rank.optimizer.step()
        sent.append(together(ranks, merging(ranks, [1, 1]))[1])
        assert ranks[0].state == ranks[1].state
        assert ranks[0].velocities == ranks[1].velocities
    assert sent[0] - sent[1] > 20 * 3 * 4  # of two times 20 rows in float32, each sends half


@pytest.mark.parametrize("is_beside", [False, True])
def test_numbers_of_steps_are_merged_where_only_rows_that_changed_are(is_beside: bool) -> None:
    ranks = make_ranks(2, make=torch.optim.SparseAdam)
    for row in (3, 4, 5):
        for rank in ranks:
            rank.set_sparse_gradient(row + rank.number)
            rank.optimizer.step()
        if is_beside:
            merge_beside(ranks, freeze(ranks, [1, 1]))
        else:
            together(ranks, merging(ranks, [1, 1]))
        first, second = (rank.optimizer.state[rank.rows] for rank in ranks)
        assert torch.equal(first["exp_avg_sq"], second["exp_avg_sq"])
        assert first["step"] == second["step"] == row - 2
        assert ranks[0].state == ranks[1].state


def test_a_momentum_that_a_rank_does_not_have_counts_for_nothing_and_is_given_to_it() -> None:
    """Rank 0 had no batch, rank 1 is new, and rank 3 has no weight."""
    ranks = make_ranks(5, new=[1])
    for rank, size in ((ranks[2], 1.0), (ranks[3], 7.0), (ranks[4], 4.0)):
        rank.step(torch.full((20, 3), size))
    together(ranks, merging(ranks, [2, 0, 4, 0, 2]))
    assert all(rank.velocities == [[2.0] * 3] * 20 for rank in ranks)
    assert all(rank.state == ranks[0].state for rank in ranks)


def test_a_momentum_that_only_ranks_without_a_weight_have_stays_theirs() -> None:
    ranks = make_ranks(2)
    ranks[0].step(torch.ones(20, 3))
    together(ranks, merging(ranks, [0, 1]))
    assert ranks[0].velocities == [[1.0] * 3] * 20
    assert not ranks[1].optimizer.state


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.AdamW, amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.ASGD,
    ],
)
@pytest.mark.parametrize("num_steps", [0, 7], ids=["fresh", "back"])
@pytest.mark.parametrize("is_beside", [False, True])
def test_one_that_joins_steps_as_its_peers_do(
    make: Callable[..., torch.optim.Optimizer], *, num_steps: int, is_beside: bool
) -> None:
    """Whether it is a new process, or was left out after steps of its own."""
    ranks = make_ranks(3, new=[1], make=make)
    generator = torch.Generator().manual_seed(5)
    for rank in ranks:
        for _ in range(num_steps if rank.number == 1 else 30):
            rank.step(torch.randn(20, 3, generator=generator))
    if is_beside:
        merge_beside(ranks, freeze(ranks, [1, 0, 1]))
    else:
        together(ranks, merging(ranks, [1, 0, 1]))
    for _ in range(5):
        gradient = torch.randn(20, 3, generator=generator)
        for rank in ranks:
            rank.step(gradient)
            assert rank.state == ranks[0].state


def test_one_that_joins_steps_as_its_peers_do_with_sparse_gradients() -> None:
    ranks = make_ranks(2, new=[1], make=torch.optim.SparseAdam)
    for _ in range(30):
        ranks[0].set_sparse_gradient(3)
        ranks[0].optimizer.step()
    together(ranks, merging(ranks, [1, 0]))
    for rank in ranks:
        rank.set_sparse_gradient(3)
        rank.optimizer.step()
    assert ranks[1].state == ranks[0].state
    assert ranks[1].optimizer.state[ranks[1].rows]["step"] == 31


def test_one_that_joins_has_adafactors_means_of_rows_and_columns() -> None:
    ranks = make_ranks(2, new=[1], make=torch.optim.Adafactor)
    ranks[0].step(torch.ones(20, 3))
    together(ranks, merging(ranks, [1, 0]))
    for rank in ranks:
        rank.step(torch.ones(20, 3))
        assert rank.state == ranks[0].state


def test_steps_keep_their_length_where_ranks_have_taken_unequal_numbers_of_them() -> None:
    """With equal gradients Adam's steps have the length of the learning rate, 0.1."""
    ranks = make_ranks(2, make=partial(torch.optim.Adam, betas=(0.9, 0.99)))
    for rank, num_steps in zip(ranks, (25, 100), strict=True):
        for _ in range(num_steps):
            rank.step(torch.ones(20, 3))
    together(ranks, merging(ranks, [25, 100]))
    for rank in ranks:
        before = rank.rows.detach().clone()
        rank.step(torch.ones(20, 3))
        torch.testing.assert_close(
            before - rank.rows, torch.full((20, 3), 0.1), rtol=0.05, atol=0.0
        )


def test_a_member_that_has_finished_takes_part_with_its_peers() -> None:
    ranks = make_ranks(3)
    calls: list[Callable[[], Any]] = [*merging(ranks, [1, 1, 1])]
    finish = ranks[2].protocol.finish

    def merge_and_finish(rank: Rank) -> Callable[[], Any]:
        return lambda: (
            rank.protocol.merge(report_of(rank.number, updates=1)),
            rank.protocol.finish(report_of(rank.number)),
        )

    calls = [merge_and_finish(rank) for rank in ranks[:2]]
    together(ranks, [*calls, lambda: finish(report_of(2))])
    assert [rank.rows.unique().tolist() for rank in ranks] == [[0.5]] * 3


def test_one_that_is_new_comes_in_by_a_merge_and_not_by_what_its_peers_agree_on() -> None:
    ranks = make_ranks(2, new=[1])

    def agree_and_merge() -> Any:
        agreed = ranks[0].protocol.agree(report_of(0), "1")
        return agreed, ranks[0].protocol.merge(report_of(0, updates=1))

    outcomes, _ = together(
        ranks, [agree_and_merge, lambda: ranks[1].protocol.agree(report_of(1), "2")]
    )
    agreed, merged = outcomes[0]
    assert [each.payload for each in agreed.proposals if not each.is_new] == ["1"]
    assert (agreed.kind, merged.kind, outcomes[1].kind) == ("agree", "merge", "merge")
    assert ranks[1].state == ranks[0].state


def test_one_that_comes_in_by_a_merge_in_the_place_of_a_step_counts_one_exchange() -> None:
    ranks = make_ranks(2, new=[1])
    ranks[0].rows.grad = torch.ones(20, 3)

    def step_and_merge() -> None:
        ranks[0].protocol.step(report_of(0, updates=1), takes_step=True)
        ranks[0].protocol.merge(report_of(0, updates=1, since_merge=1))

    together(ranks, [step_and_merge, lambda: ranks[1].protocol.step(report_of(1), takes_step=True)])
    assert ranks[1].state == ranks[0].state
    assert ranks[1].protocol.num_merges == ranks[1].protocol.num_exchanges == 1


def test_one_that_is_new_hears_that_the_run_has_ended() -> None:
    ranks = make_ranks(2, new=[1])
    outcomes, _ = together(
        ranks,
        [
            lambda: ranks[0].protocol.finish(report_of(0)),
            lambda: ranks[1].protocol.agree(report_of(1), "1"),
        ],
    )
    assert not outcomes[0]
    assert isinstance(outcomes[1], ConfigError)
    assert "ended while this worker was on its way in" in str(outcomes[1])


def test_a_model_that_is_not_finite_reaches_nobody() -> None:
    ranks = make_ranks(2)
    ranks[1].rows.detach()[0, 0] = torch.nan
    outcomes, _ = together(ranks, merging(ranks, [1, 1]))
    assert isinstance(outcomes[1], NonFiniteError)
    assert isinstance(outcomes[0], OffbeatError)
    assert ranks[0].rows.unique().tolist() == [0.0]


# Beside training


FOLLOWING = ClaimRound(epoch=0, mega_batch=1, round=1, retry=0, spans=(SampleRange(0, 1),))


def freeze(ranks: Sequence[Rank], updates: Sequence[int]) -> list[ModelSnapshot]:
    """Of ranks that go on."""
    return [
        rank.protocol.freeze(
            replace(report_of(rank.number, updates=number, since_merge=1), following=FOLLOWING)
        )
        for rank, number in zip(ranks, updates, strict=True)
    ]


def merge_beside(
    ranks: Sequence[Rank], snapshots: Sequence[ModelSnapshot], num_steps: Sequence[int] = ()
) -> int:
    """Merge the snapshots, and take the outcome over; how many bytes were sent.

    Args:
        ranks: that merge.
        snapshots: of them.
        num_steps: that each has taken since; none unless given.
    """

    pairs = zip(ranks, snapshots, strict=True)
    merged, sent = together(
        ranks, [partial(rank.protocol.merge_snapshot, each) for rank, each in pairs]
    )
    for rank, each, count in zip(ranks, merged, num_steps or [0] * len(ranks), strict=True):
        rank.protocol.take(each, num_steps=count)
    return sent


def bits(rank: Rank) -> list[list[int]]:
    tensors = [rank.rows, rank.dense, *(each["momentum_buffer"] for each in rank.states)]
    return [each.detach().view(torch.uint8).flatten().tolist() for each in tensors]


def some_ranks(size: int, *, new: Sequence[int] = ()) -> list[Rank]:
    """With models drawn from their numbers, and a momentum each but the last two, where there are
    more than two.
    """
    ranks = make_ranks(size, new=new)
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank.number)
        rank.rows.detach().copy_(torch.randn(20, 3, generator=generator))
        rank.rows.detach()[0, 0] = -0.0
        rank.dense.detach().copy_(torch.randn(2, generator=generator))
        if rank.number < 2 or rank.number < size - 2:
            rank.step(torch.randn(20, 3, generator=generator))
    return ranks


@pytest.mark.parametrize(("size", "new"), [(1, []), (3, []), (5, [2])])
def test_where_nobody_steps_meanwhile_it_is_the_merge_that_is_waited_for(
    size: int, new: list[int]
) -> None:
    """To the bit, whole or by rows, twice in a row."""
    waiting, beside = some_ranks(size, new=new), some_ranks(size, new=new)
    for _ in range(2):
        for rank in (*waiting, *beside):
            rank.rows.detach()[rank.number] += 1.0 / 3
            rank.set_sparse_gradient()
        together(waiting, merging(waiting, range(1, size + 1)))
        merge_beside(beside, freeze(beside, range(1, size + 1)))
        for one, other in zip(waiting, beside, strict=True):
            assert bits(one) == bits(other)
            assert int(one.count) == int(other.count)
            assert one.protocol.num_merges == other.protocol.num_merges


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("dies", [False, True])
def test_each_rank_keeps_what_it_did_since_its_snapshot(size: int, *, dies: bool) -> None:
    """Rank 1 takes no step, and rank 2 is new."""
    ranks = make_ranks(size, new=[2])
    updates = [2, 1, 0, 1, 4][:size]
    for rank in ranks:
        rank.count.add_(rank.number)
    snapshots = freeze(ranks, updates)
    if dies:
        # The last rank dies before the commit: nobody takes the outcome.
        pairs = zip(ranks, snapshots, strict=True)
        together(ranks, [partial(rank.protocol.merge_snapshot, each) for rank, each in pairs])
    progress = [0.25, 0.0, 0.0, 3.0, -5.5]
    for rank, by in zip(ranks, progress, strict=False):
        rank.rows.detach().add_(by)
        rank.count.add_(1 if by else 0)
    left = size - 1 if dies else size
    merge_beside(ranks[:left], snapshots[:left])
    parties = [n for n in range(left) if n != 2]
    mean = sum(updates[n] * n for n in parties) / sum(updates[n] for n in parties)
    for rank, by in zip(ranks[:left], progress, strict=False):
        merged = torch.tensor(mean)
        torch.testing.assert_close(rank.rows.detach(), (merged + by).expand(20, 3))
        assert int(rank.count) == 2 * max(parties) + (1 if by else 0)
    assert not any(rank.group.is_new for rank in ranks[:left])


def test_a_wait_for_the_next_merge_leaves_all_with_one_model() -> None:
    """Sparse steps before, during and after a merge; the same as where all rows are merged."""
    found = []
    for is_sparse in (True, False):
        ranks, sent = make_ranks(3), []
        for rank in ranks:
            rank.begin_at_zero()
        for number in range(3):
            for rank in ranks:
                rank.rows.detach()[rank.number + number] += 1.0
                if is_sparse:
                    rank.set_sparse_gradient(rank.number + number)
            snapshots = freeze(ranks, [1, 2, 1])
            for rank in ranks[:2]:
                rank.rows.detach()[7 + rank.number + number] -= 2.0
            sent.append(merge_beside(ranks, snapshots))
        together(ranks, merging(ranks, [1, 1, 2]))
        assert all(bits(rank) == bits(ranks[0]) for rank in ranks)
        found.append((ranks[0].rows.tolist(), sent))
    (rows, few), (all_rows, whole) = found
    assert rows == all_rows
    assert few[2] < whole[2]


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        partial(torch.optim.Adam, betas=(0.5, 0.75)),
        partial(torch.optim.AdamW, betas=(0.9, 0.9)),
    ],
)
def test_running_averages_are_as_if_a_rank_had_gone_on_with_the_merged_ones(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    """One rank takes three steps while the merge is under way, or after it."""
    found = []
    for is_beside in (True, False):
        ranks = make_ranks(3, make=make)
        for rank in ranks:
            rank.step(torch.full((20, 3), 1.0 + rank.number))
        snapshots = freeze(ranks, [1, 1, 2])
        if not is_beside:
            merge_beside(ranks, snapshots)
        for size in (-3.0, 0.0, 8.0):
            ranks[1].step(torch.full((20, 3), size))
        if is_beside:
            merge_beside(ranks, snapshots, [0, 3, 0])
        found.append([rank.optimizer.state[rank.rows] for rank in ranks])
    for beside, after in zip(*found, strict=True):
        torch.testing.assert_close(beside, after)


def test_a_momentum_is_the_merged_one_where_its_parameter_had_no_gradient_meanwhile() -> None:
    ranks = make_ranks(2)
    for rank in ranks:
        rank.step(torch.full((20, 3), 1.0 + rank.number))
    snapshots = freeze(ranks, [1, 1])
    ranks[1].optimizer.zero_grad()
    for _ in range(3):
        ranks[1].optimizer.step()
    merge_beside(ranks, snapshots, [0, 3])
    assert [rank.velocities for rank in ranks] == [[[1.5] * 3] * 20] * 2


def test_a_variance_that_fell_meanwhile_stays_positive() -> None:
    ranks = make_ranks(2, make=partial(torch.optim.Adam, betas=(0.5, 0.5)))
    for rank in ranks:
        rank.step(torch.full((20, 3), 10.0 if rank.number == 0 else 1.0))
    snapshots = freeze(ranks, [1, 1])
    for _ in range(20):
        ranks[0].step(torch.zeros(20, 3))
    merge_beside(ranks, snapshots, [20, 0])
    second_moments = [rank.optimizer.state[rank.rows]["exp_avg_sq"] for rank in ranks]
    assert all(bool((moment > 0).all()) for moment in second_moments)
    assert second_moments[1].unique().item() == pytest.approx((50 + 0.5) / 2)
    assert [int(rank.optimizer.state[rank.rows]["step"]) for rank in ranks] == [21, 1]


def test_all_wait_for_a_merge_or_none_does() -> None:
    waits, goes_on = proposal("merge"), proposal("merge", rank=1)
    goes_on = replace(goes_on, report=replace(goes_on.report, following=FOLLOWING))
    with pytest.raises(MismatchError, match="some ranks wait for this merge"):
        agreed_kind([waits, goes_on])
    assert MergeProposal.from_bytes(goes_on.to_bytes()) == goes_on


CODECS = {
    "linear4": AllChanges("linear4"),
    "sign": AllChanges("sign"),
    "sparse": WeightCodec(density=0.1, entries="bfloat16"),
}


def begun(size: int, codec: WeightCodec) -> list[Rank]:
    """Ranks that hold the same model."""
    ranks = make_ranks(size, codec=codec)
    for rank in ranks:
        rank.begin_at_zero()
        assert rank.momentum is not None
        rank.momentum.begin()
    return ranks


def train_apart(ranks: Sequence[Rank], seed: int) -> None:
    for rank in ranks:
        draw = torch.Generator().manual_seed(100 * seed + rank.number)
        for parameter in rank.parameters.values():
            parameter.detach().add_(torch.randn(parameter.shape, generator=draw))


def owed_by(ranks: Sequence[Rank]) -> dict[str, torch.Tensor]:
    """In all."""
    states = [rank.changes.state() for rank in ranks if rank.changes is not None]
    return {
        name: torch.stack([state[f"owed/{name}"] for state in states]).sum(0)
        for name in ("rows", "dense")
    }


def mean_of(ranks: Sequence[Rank], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    return {
        name: sum(
            weight / sum(weights) * rank.parameters[name].detach().float()
            for rank, weight in zip(ranks, weights, strict=True)
        )
        for name in ("rows", "dense")
    }  # type: ignore[return-value]  # there is at least one rank


def merged_of(rank: Rank) -> dict[str, torch.Tensor]:
    """In the type in which means are computed."""
    assert rank.momentum is not None
    return dict(zip(rank.parameters, rank.momentum.latest, strict=True))


def assert_nothing_is_lost(ranks: Sequence[Rank], weights: list[int], seed: int) -> None:
    """Train, and merge: merged + owed == mean + what was owed before, on replicas that agree."""
    train_apart(ranks, seed)
    mean, before = mean_of(ranks, weights), owed_by(ranks)
    outcomes, _ = together(ranks, merging(ranks, weights))
    assert not [one for one in outcomes if isinstance(one, BaseException)]
    after, merged = owed_by(ranks), merged_of(ranks[0])
    for name in merged:
        torch.testing.assert_close(merged[name] + after[name], mean[name] + before[name])
    assert all(rank.state == ranks[0].state for rank in ranks)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_coded_merges_lose_nothing(size: int, codec: WeightCodec) -> None:
    ranks = begun(size, codec)
    for seed in range(3):
        assert_nothing_is_lost(ranks, [2, 1, 3, 0, 2][:size], seed)
    assert any(owed.any() for owed in owed_by(ranks).values())


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_coded_merge_that_a_death_makes_void_changes_nothing(
    size: int, codec: WeightCodec
) -> None:
    ranks = begun(size, codec)
    assert_nothing_is_lost(ranks, [1] * size, seed=0)
    before = owed_by(ranks[:-1])
    outcomes, _ = together(ranks, merging(ranks, [1] * size), dies=size - 1)
    assert all(isinstance(outcome, PeerError) for outcome in outcomes)
    torch.testing.assert_close(owed_by(ranks[:-1]), before, rtol=0, atol=0)
    assert_nothing_is_lost(ranks[:-1], [1] * (size - 1), seed=1)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_one_that_joins_coded_merges_has_the_model_of_its_peers(codec: WeightCodec) -> None:
    ranks = begun(3, codec)
    assert_nothing_is_lost(ranks[:2], [1, 1], seed=0)
    ranks[2].group.is_new = True
    train_apart(ranks, seed=1)
    together(ranks, merging(ranks, [1, 1, 0]))
    assert ranks[2].state == ranks[0].state == ranks[1].state
    assert_nothing_is_lost(ranks, [1, 1, 1], seed=2)


def test_what_is_owed_is_saved_and_fits_the_model_alone() -> None:
    codec = CODECS["sparse"]
    saved, other = begun(2, codec), MergedChanges({"rows": torch.zeros(20, 3)}, codec)
    assert_nothing_is_lost(saved, [1, 1], seed=0)
    resumed = begun(2, codec)
    for one, two in zip(saved, resumed, strict=True):
        assert one.changes is not None
        assert two.changes is not None
        two.changes.load(one.changes.state())
    torch.testing.assert_close(owed_by(resumed), owed_by(saved), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="another model or codec"):
        resumed[0].changes.load(other.state())  # type: ignore[union-attr]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_frozen_parameter_travels_whole_and_owes_what_it_has_owed(codec: WeightCodec) -> None:
    ranks = begun(3, codec)
    assert_nothing_is_lost(ranks, [1, 1, 1], seed=0)
    for rank in ranks:
        rank.rows.requires_grad_(False)
    before = owed_by(ranks)["rows"]
    train_apart(ranks, seed=1)
    mean = mean_of(ranks, [1, 1, 2])["rows"]
    together(ranks, merging(ranks, [1, 1, 2]))
    torch.testing.assert_close(ranks[1].rows.detach(), mean)
    torch.testing.assert_close(owed_by(ranks)["rows"], before, rtol=0, atol=0)


# Merge weights are a mean's, and what the published ones do to the model.


workers = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=8
).filter(lambda drawn: any(made for made, _ in drawn))
weights = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(normalised)


@given(workers)
def test_weights_sum_to_one_and_who_did_nothing_has_none(drawn: list[tuple[int, int]]) -> None:
    updates, sizes = [made for made, _ in drawn], [size for _, size in drawn]
    found = merge_weights(updates, sizes)
    assert sum(found) == pytest.approx(1.0)
    assert all(weight == 0.0 for weight, made in zip(found, updates, strict=True) if not made)


@given(workers)
def test_equal_updates_make_the_weights_those_of_samples(drawn: list[tuple[int, int]]) -> None:
    sizes = [size for _, size in drawn]
    assert merge_weights([7] * len(sizes), sizes) == pytest.approx(
        normalised([7 * size for size in sizes])
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(2, 100)), min_size=1, max_size=8), st.data()
)
def test_a_remnant_counts_by_its_samples(drawn: list[tuple[int, int]], data: st.DataObject) -> None:
    """One more update, with less than half a batch, changes weights by no more than its samples."""
    updates, sizes = [made for made, _ in drawn], [size for _, size in drawn]
    counted = [float(made) for made in updates]
    worker = data.draw(st.integers(0, len(drawn) - 1))
    counted[worker] += data.draw(st.floats(0, 0.499))
    without, found = merge_weights(updates, sizes), merge_weights(counted, sizes)
    assert found == pytest.approx(without, abs=0.5 / min(updates))
    assert found[worker] >= without[worker] - 1e-12


@given(weights)
def test_perturbed_weights_are_still_a_means(weights: tuple[float, ...]) -> None:
    found = perturbed(weights, [0.0] * len(weights))
    assert sum(found) == pytest.approx(1.0)
    assert all(weight >= 0 for weight in found)
    assert found.index(max(found)) == weights.index(max(weights))


def test_large_replicas_and_equal_weights_are_left_alone() -> None:
    assert perturbed([0.6, 0.4], [0.05, 0.2]) == (0.6, 0.4)
    assert perturbed([0.5, 0.5], [0.0, 0.0]) == (0.5, 0.5)


@given(st.floats(-10, 10), st.floats(0, 0.99))
def test_momentum_goes_on_in_the_last_direction_from_the_second_merge_on(
    model: float, gamma: float
) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), model, dtype=torch.float64))
    momentum = MergeMomentum({"w": parameter}, gamma=gamma)
    momentum.begin()

    def merged(at: float) -> torch.Tensor:
        (moved,) = momentum.added_to([torch.full_like(parameter, at)])
        return moved

    assert torch.equal(merged(model), parameter)
    assert torch.equal(merged(model + 1), torch.full_like(parameter, model + 1))
    momentum.move_to([torch.full_like(parameter, model + 1)])
    torch.testing.assert_close(merged(3.0), torch.full_like(parameter, 3 + gamma))


def momentum_of(num_merges: int, dtypes: list[torch.dtype]) -> MergeMomentum:
    """The momentum of a model with one parameter of each type, after some merges."""
    generator = torch.Generator().manual_seed(num_merges)
    parameters = {
        f"layer/{number}": torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        for number, dtype in enumerate(dtypes)
    }
    momentum = MergeMomentum(parameters, gamma=0.5)
    for _ in range(num_merges):
        momentum.begin()
        means = [
            parameter.to(torch.promote_types(parameter.dtype, torch.float32)) + 1
            for parameter in parameters.values()
        ]
        momentum.move_to(momentum.added_to(means))
    return momentum


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("num_merges", range(3))
def test_the_state_of_the_momentum_arrives_to_the_bit(num_merges: int) -> None:
    sent, received = momentum_of(num_merges, DTYPES), momentum_of(3, DTYPES)
    received.from_bytes(sent.to_bytes())
    expected, state = sent.state(), received.state()
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor)
        assert state[key].dtype == tensor.dtype


def test_the_momentum_of_another_model_is_refused() -> None:
    received = momentum_of(1, DTYPES)
    with pytest.raises(WireError, match="do all ranks train the same model"):
        received.from_bytes(momentum_of(1, DTYPES[:2]).to_bytes())
    with pytest.raises(WireError, match="the merges' momentum is damaged"):
        received.from_bytes(momentum_of(1, DTYPES).to_bytes()[:-8])


def test_a_sparse_gradient_of_a_vector_is_averaged_where_all_its_elements_have_one() -> None:
    """As that of a label layer's bias has, where all labels are drawn."""
    ranks = make_ranks(2)
    for rank in ranks:
        values = torch.full((2,), 1.0 + 2 * rank.number, dtype=torch.bfloat16)
        everything = torch.arange(2).unsqueeze(0)
        rank.dense.grad = torch.sparse_coo_tensor(everything, values, (2,), check_invariants=True)
    together(
        ranks,
        [
            partial(rank.protocol.step, report_of(rank.number, updates=1), takes_step=True)
            for rank in ranks
        ],
    )
    for rank in ranks:
        assert rank.dense.grad is not None
        assert rank.dense.grad.is_sparse
        assert rank.dense.grad.to_dense().tolist() == [2.0, 2.0]


def test_steps_of_one_that_has_finished_are_in_the_merge_of_those_who_go_on() -> None:
    """No loader gives them out again."""
    ranks = make_ranks(2)
    for rank in ranks:
        rank.begin_at_zero()
    ranks[1].rows.detach().fill_(8.0)

    def go_on_and_finish() -> None:
        ranks[0].protocol.merge(report_of(0, updates=1, since_merge=1))
        ranks[0].protocol.finish(report_of(0))

    calls: list[Callable[[], Any]] = [
        go_on_and_finish,
        lambda: ranks[1].protocol.finish(report_of(1, updates=3, since_merge=3)),
    ]
    together(ranks, calls)
    assert [rank.rows.unique().tolist() for rank in ranks] == [[6.0]] * 2
