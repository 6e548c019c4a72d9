"""Averages of two at any time: random schedules, and some made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from group_support.own_messages import arrive, finish
from group_support.world import GENERATION, SERVE, Schedule, World, draw_pairs
from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.deadlines import DeadlineRule
from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolCounts,
    ProtocolSettings,
    VersionResult,
)
from offbeat.codec.model_wire import ABSENT, MessageKind, ModelMessage
from offbeat.errors import OffbeatError, WireError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.strategies.adpsgd import PairMember
from offbeat.transport.operations import Collective, Now, Post, RecvAny, Send, Sleep
from offbeat.transport.single_rank import SingleRank

LATENCY_S = 0.001


def run(schedule: Schedule) -> World:
    world = World(schedule)
    world.run()
    return world


@pytest.mark.parametrize("first", range(0, 36, 12))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 12):
        run(draw_pairs(seed))


@pytest.mark.parametrize("first", range(400, 412, 12))
def test_random_schedules_with_rounded_values(first: int) -> None:
    for seed in range(first, first + 12):
        run(draw_pairs(seed, rounds=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(10_000, 20_000, 1000))
def test_ten_thousand_random_schedules(first: int) -> None:
    for seed in range(first, first + 1000):
        run(draw_pairs(seed))


@pytest.mark.parametrize("seed", range(0, 20, 10))
def test_a_seed_replays_its_schedule(seed: int) -> None:
    first, second = run(draw_pairs(seed)), run(draw_pairs(seed))
    assert first.cluster.now_s == second.cluster.now_s
    assert first.counts == second.counts
    assert [model.values.tobytes() for model in first.models] == [
        model.values.tobytes() for model in second.models
    ]


@pytest.mark.parametrize("world_size", range(2, 10))
def test_no_rank_waits_for_one_that_computes(world_size: int) -> None:
    world = run(Schedule(seed=world_size, world_size=world_size, num_steps=20, pairs=True))
    for model in world.models:
        assert len(model.waits_s) == 20
        assert np.isfinite(model.values).all()
        assert sum(wait_s for _, wait_s in model.waits_s) <= 20 * 2 * LATENCY_S + 1e-9


class FakeModel:
    """Contributes what it has and merges averages."""

    def __init__(self, value: float, *, gives: bool = True) -> None:
        self.values = np.full(4, value)
        self.gives = gives
        self.contributed: list[int] = []
        self.outcomes: list[VersionResult] = []
        self.clock: Callable[[], float] = float
        self.opened_at_s: dict[int, float] = {}
        self.closed_at_s: dict[int, float] = {}
        self.merged_late: list[int] = []
        self.marked_dead: list[int] = []

    def contribute(self, version: int) -> Contribution | None:
        self.contributed.append(version)
        self.opened_at_s[version] = self.clock()
        return Contribution(values=self.values.copy(), step=5, fresh=False) if self.gives else None

    def invite(self, version: int) -> None:
        raise AssertionError("no rank is waited for")

    def quorum_arrived(self, version: int) -> None:
        raise AssertionError("no rank is waited for")

    def close_version(self, outcome: VersionResult) -> None:
        self.outcomes.append(outcome)
        self.closed_at_s[outcome.version] = self.clock()
        for piece in outcome.pieces:
            self._merge(piece)

    def merge_late(self, version: int, piece: Piece) -> None:
        self.merged_late.append(version)
        self._merge(piece)

    def snapshot(self) -> Contribution | None:
        return None

    def receive_model(self, sender: int, state: Contribution | None) -> None:
        raise AssertionError(f"rank {sender} was not asked")

    def finalize_version(self, version: int) -> None:
        pass

    def mark_dead(self, rank: int) -> None:
        self.marked_dead.append(rank)

    def mark_final(self) -> None:
        pass

    def _merge(self, piece: Piece) -> None:
        assert piece.contributed is not None
        self.values = piece.average[:] + (self.values - piece.contributed[:])


def settings_of(rank: int, world_size: int, partners: Sequence[int]) -> ProtocolSettings:
    return ProtocolSettings(
        members=tuple(range(world_size)),
        generation=GENERATION,
        num_elements=4,
        dtype=np.dtype(np.float64),
        reply_deadline=DeadlineRule(floor_s=0.1, initial_s=0.5, min_samples=2),
        group_of=lambda version: VersionGroup(
            ranks=(rank, partners[version % len(partners)]) if partners else (rank,)
        ),
    )


def cluster_of(num_ranks: int, latency_s: float = LATENCY_S) -> VirtualCluster:
    return VirtualCluster(
        num_ranks, watch_all=False, link=VirtualLink(latency_s=latency_s), death_notice_s=0.2
    )


def play(
    cluster: VirtualCluster,
    ports: list[FakeModel],
    *arrivals_s: list[float],
    partners: list[list[int]] | None = None,
) -> list[ProtocolCounts | OffbeatError]:
    """Each rank arrives at its versions 0, 1, ... at its times, with the next rank if not told, and
    finishes after 10 s.
    """

    def train(rank: int) -> Collective[None]:
        for version, when_s in enumerate(arrivals_s[rank]):
            yield Sleep(when_s - (yield Now()))
            yield Post(arrive(version, generation=GENERATION))
        yield Sleep(10.0 - (yield Now()))
        yield Post(finish(generation=GENERATION))

    world_size = len(ports)
    for port in ports:
        port.clock = lambda: cluster.now_s
    for rank in range(world_size):
        cluster.begin(rank, train(rank), channel=SERVE)
    partners = partners or [[(rank + 1) % world_size] for rank in range(world_size)]
    work = [
        PairMember(rank, settings_of(rank, world_size, partners[rank]), port).serve()
        for rank, port in enumerate(ports)
    ]
    return cluster.outcomes(work, channel=SERVE)


def test_a_rank_that_is_asked_answers_at_once_and_both_have_the_same_bits() -> None:
    ports = [FakeModel(1.0), FakeModel(8.0)]
    play(cluster_of(2), ports, [1.0], [])
    (asked,), (answered,) = ports[0].outcomes, ports[1].outcomes
    assert (asked.version, answered.version) == (0, -1)
    assert asked.group == answered.group == (0, 1)
    assert ports[0].closed_at_s[0] == pytest.approx(1.0 + 2 * LATENCY_S)
    assert (
        asked.pieces[0].average.tobytes()
        == answered.pieces[0].average.tobytes()
        == np.full(4, 4.5).tobytes()
    )
    assert asked.pieces[0].notes == answered.pieces[0].notes
    assert ports[0].values.tolist() == ports[1].values.tolist() == [4.5] * 4


def test_two_that_ask_each_other_at_once_are_averaged_once() -> None:
    ports = [FakeModel(1.0), FakeModel(8.0)]
    play(cluster_of(2), ports, [1.0, 2.0], [1.0, 2.0])
    assert ports[0].contributed == [0, 1]
    assert ports[1].contributed == [0, -1, 1, -2]
    assert [outcome.version for outcome in ports[1].outcomes if outcome.pieces] == [-1, -2]
    assert ports[0].values.tolist() == ports[1].values.tolist() == [4.5] * 4
    for port in ports:
        assert all(
            closed_s - port.opened_at_s[version] <= 2 * LATENCY_S + 1e-9
            for version, closed_s in port.closed_at_s.items()
        )


@pytest.mark.parametrize("world_size", range(2, 10))
def test_ranks_in_lock_step_converge(world_size: int) -> None:
    draw = random.Random(world_size)
    ports = [FakeModel(float(rank)) for rank in range(world_size)]
    partners = [
        [draw.choice([other for other in range(world_size) if other != rank]) for _ in range(40)]
        for rank in range(world_size)
    ]
    play(
        cluster_of(world_size),
        ports,
        *[[1.0 + 0.1 * step for step in range(40)]] * world_size,
        partners=partners,
    )
    values = np.array([port.values for port in ports])
    np.testing.assert_allclose(values.mean(axis=0), (world_size - 1) / 2)
    assert np.ptp(values, axis=0).max() < 0.02 * world_size


def test_a_ring_in_which_all_ask_at_once_does_not_wait_for_ever() -> None:
    ports = [FakeModel(float(rank)) for rank in range(5)]
    play(cluster_of(5), ports, *[[1.0, 1.0, 1.0]] * 5)
    assert [len(port.outcomes) for port in ports] == [6] * 5
    np.testing.assert_allclose(sum(port.values for port in ports), 10.0)


def test_a_silent_partner_is_suspected_and_its_answer_merged_when_it_comes() -> None:
    cluster, ports = cluster_of(2), [FakeModel(1.0), FakeModel(8.0)]
    cluster.at(0.5, lambda: cluster.freeze(1, 3.0))
    outcomes = play(cluster, ports, [1.0, 2.0, 5.0], [])
    closed = {outcome.version: outcome for outcome in ports[0].outcomes}
    assert [bool(closed[version].pieces) for version in range(3)] == [False, False, True]
    assert ports[0].closed_at_s[0] == pytest.approx(1.5)
    assert ports[0].closed_at_s[1] == pytest.approx(2.0)
    assert ports[0].merged_late == [0]
    assert ports[1].contributed == [-1, -2]
    assert ports[0].values.tolist() == ports[1].values.tolist() == [4.5] * 4
    assert outcomes[0] == ProtocolCounts(suspicions=1, stopped={0, 1})


def test_how_long_answers_take_is_learned() -> None:
    ports = [FakeModel(1.0), FakeModel(8.0)]
    play(cluster_of(2, latency_s=1.0), ports, [1.0, 3.5, 6.0], [])
    assert [bool(outcome.pieces) for outcome in ports[0].outcomes] == [False, False, True]
    assert [*ports[0].closed_at_s.values()] == pytest.approx([1.5, 4.0, 8.0])
    assert ports[0].merged_late == [0, 1]


def test_a_dead_partner_is_waited_for_until_that_is_known() -> None:
    cluster, ports = cluster_of(2), [FakeModel(1.0), FakeModel(8.0)]
    cluster.at(0.9, lambda: cluster.kill(1))
    play(cluster, ports, [1.0, 2.0], [])
    assert [*ports[0].closed_at_s.values()] == pytest.approx([1.1, 2.0])
    assert ports[0].marked_dead == [1]
    assert ports[0].values.tolist() == [1.0] * 4


def test_a_partner_that_stays_out_says_so() -> None:
    ports = [FakeModel(1.0), FakeModel(8.0, gives=False)]
    play(cluster_of(2), ports, [1.0], [])
    for port in ports:
        (outcome,) = port.outcomes
        assert outcome.pieces == ()
    assert ports[0].closed_at_s[0] == pytest.approx(1.0 + 2 * LATENCY_S)
    assert ports[0].values.tolist() == [1.0] * 4


def test_a_rank_without_a_contribution_asks_no_peer() -> None:
    ports = [FakeModel(1.0, gives=False), FakeModel(8.0)]
    play(cluster_of(2), ports, [1.0], [])
    assert [(outcome.version, outcome.pieces) for outcome in ports[0].outcomes] == [(0, ())]
    assert ports[1].contributed == []


def test_a_world_of_one_keeps_what_it_has() -> None:
    solo, port = SingleRank(), FakeModel(1.0)
    for message in (
        arrive(0, generation=GENERATION),
        arrive(0, generation=GENERATION),
        finish(generation=GENERATION),
    ):
        solo.start(Post(message), SERVE)
    assert solo.run(PairMember(0, settings_of(0, 1, []), port).serve(), SERVE) == ProtocolCounts(
        stopped={0}
    )
    assert [(outcome.version, outcome.pieces) for outcome in port.outcomes] == [(0, ())]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"kind": MessageKind.AVERAGE, "notes": (ABSENT, ABSENT), "values": np.empty(0)},
            "not asked for",
        ),
        ({"num_elements": 5, "values": np.zeros(5)}, "same model"),
        ({"values": np.zeros(4, np.float32)}, "same model"),
        ({"counters": np.zeros(1, np.int64)}, "same model"),
    ],
)
def test_a_message_that_cannot_be_right_is_one_clear_error(
    changes: dict[str, object], complaint: str
) -> None:
    options = {
        "kind": MessageKind.CHUNK,
        "generation": GENERATION,
        "version": 0,
        "weight": 1.0,
        "num_elements": 4,
        "values": np.zeros(4),
    }
    # tests name fields that exist
    message = ModelMessage(**(options | changes))  # type: ignore[arg-type]
    port = FakeModel(1.0)

    def intrude() -> Collective[ProtocolCounts]:
        yield Send(0, message.to_bytes())
        yield RecvAny(frozenset({0}))
        return ProtocolCounts()

    outcome = cluster_of(2).outcomes(
        [PairMember(0, settings_of(0, 2, [1]), port).serve(), intrude()], channel=SERVE
    )[0]
    assert isinstance(outcome, WireError)
    assert complaint in str(outcome)
    assert port.outcomes == []
