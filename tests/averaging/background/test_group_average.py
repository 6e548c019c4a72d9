"""Group averages under schedules made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from group_support.own_messages import (
    arrive,
    fetch_model,
    finish,
    stop_stepping,
)
from group_support.world import GENERATION, SERVE, Schedule, World
from offbeat.arithmetic.groups import VersionGroup, group_of_version
from offbeat.averaging.background.deadlines import DeadlineRule
from offbeat.averaging.background.group_average import RoundManager
from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolCounts,
    ProtocolSettings,
    VersionResult,
)
from offbeat.codec.model_wire import MessageKind, ModelMessage
from offbeat.errors import OffbeatError, WireError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.operations import Collective, Payload, Post, RecvAny, Send, Sleep
from offbeat.transport.single_rank import SingleRank

LATENCY_S = 0.001
BOTH_WAYS = pytest.mark.parametrize("direct_bytes", [0, 1 << 20], ids=["scattered", "direct"])


def run(schedule: Schedule) -> World:
    world = World(schedule)
    world.run()
    return world


@BOTH_WAYS
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_a_group_of_all_that_arrive_together_is_an_all_reduce(
    world_size: int, direct_bytes: int
) -> None:
    world = run(
        Schedule(
            seed=1,
            world_size=world_size,
            group_size=max(2, world_size),
            num_steps=1,
            direct_bytes=direct_bytes,
            quorum=1.0,
            period=1,
        )
    )
    mean = world.total / world_size
    for model in world.models:
        np.testing.assert_allclose(model.values[::2], mean, rtol=1e-12)
        assert model.values.tobytes() == world.models[0].values.tobytes()
        (outcome,) = model.closed
        assert all(note.fresh and note.weight == 1.0 for note in outcome.members.values())


@BOTH_WAYS
def test_a_rank_that_computes_contributes_its_last_snapshot_and_computes_on(
    direct_bytes: int,
) -> None:
    late_s = 100.0
    world = run(
        Schedule(
            seed=2,
            world_size=3,
            group_size=3,
            num_steps=1,
            direct_bytes=direct_bytes,
            compute_s=lambda rank, step: late_s if rank == 2 else 1.0 + rank,
        )
    )
    (outcome,) = world.models[0].closed
    assert {rank: note.fresh for rank, note in outcome.members.items()} == {
        0: True,
        1: False,
        2: False,
    }
    assert world.models[0].closed_at_s[0] <= 1.0 + 3 * LATENCY_S + 1e-9
    assert world.models[2].closed_at_s[0] < late_s
    assert world.models[2].waits_s == []


def test_a_rank_that_is_twice_as_slow_does_not_delay_its_peers() -> None:
    world = run(
        Schedule(
            seed=3,
            world_size=8,
            group_size=4,
            num_steps=20,
            num_elements=40,
            compute_s=lambda rank, step: 2.0 if rank == 5 else 1.0,
        )
    )
    for rank in set(range(8)) - {5}:
        assert sum(wait_s for _, wait_s in world.models[rank].waits_s) <= 20 * 3 * LATENCY_S + 1e-9


def sync_of_four(quorum: float, reply_deadline: DeadlineRule | None = None) -> World:
    return run(
        Schedule(
            seed=4,
            world_size=4,
            group_size=2,
            num_steps=1,
            period=1,
            quorum=quorum,
            reply_deadline=reply_deadline or DeadlineRule(cap_s=1000.0),
            compute_s=lambda rank, step: [1.0, 2.0, 3.0, 50.0][rank],
        )
    )


@pytest.mark.parametrize(("quorum", "at_s"), [(0.25, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 50.0)])
def test_a_global_synchronization_waits_for_its_quorum_and_no_longer(
    quorum: float, at_s: float
) -> None:
    for model in sync_of_four(quorum).models:
        assert at_s <= model.closed_at_s[0] <= at_s + 4 * LATENCY_S


def synchronization_over_slow_links(quorum: float, **changes: object) -> World:
    """A model takes 0.2 s to send, the announcement of an arrival 0.5 ms."""
    options: dict[str, object] = {
        "seed": 11,
        "world_size": 4,
        "num_elements": 4000,
        "num_steps": 1,
        "period": 1,
        "quorum": quorum,
        "overlap": True,
        "reply_deadline": DeadlineRule(cap_s=1000.0, initial_s=1000.0),
        "link": VirtualLink(latency_s=LATENCY_S, bytes_per_s=4000 * 8 / 0.2),
        "compute_s": lambda rank, step: [1.0, 2.0, 3.0, 50.0][rank],
    }
    # tests name fields that exist
    return run(Schedule(**(options | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("quorum", "at_s"), [(0.5, 2.0), (0.75, 3.0), (1.0, 50.0)])
def test_a_trainer_that_overlaps_waits_for_arrivals_and_not_for_the_average(
    quorum: float, at_s: float
) -> None:
    world = synchronization_over_slow_links(quorum)
    words_s = LATENCY_S + 2 * 3 * 0.0005
    for model, arrived_s in zip(world.models, [1.0, 2.0, 3.0, 50.0], strict=True):
        assert model.closed_at_s[0] > at_s + 0.75 * 0.2
        if arrived_s <= at_s:
            assert [wait_s for _, wait_s in model.waits_s] == [
                pytest.approx(at_s - arrived_s, abs=words_s + 1e-9)
            ]


def test_no_rank_proceeds_before_the_slowest_has_arrived_at_a_version_that_waits_for_all() -> None:
    def compute_s(rank: int, step: int) -> float:
        return 5.0 if rank == 3 else 1.0

    world = synchronization_over_slow_links(
        1.0, period=3, num_steps=12, num_elements=400, compute_s=compute_s
    )
    slowest = world.models[3]
    meetings = [
        version for version in slowest.quorum_at_s if world.group_of(3, version).min_arrivals == 4
    ]
    assert len(meetings) >= 3
    for version in meetings:
        later = [
            at_s
            for model in world.models
            for other, at_s in model.opened_at_s.items()
            if other > version
        ]
        assert min(later, default=math.inf) >= slowest.quorum_at_s[version]


def test_a_version_proceeds_without_a_quorum_that_does_not_arrive_in_time() -> None:
    world = sync_of_four(0.75, DeadlineRule(floor_s=0.1, cap_s=0.5))
    assert all(
        model.closed_at_s[0] == pytest.approx(1.5, abs=4 * LATENCY_S) for model in world.models
    )
    assert [counts.suspicions for counts in world.counts] == [0] * 4


@BOTH_WAYS
def test_a_suspended_rank_is_waited_for_once_and_takes_part_again(direct_bytes: int) -> None:
    reply_deadline = DeadlineRule(floor_s=0.05, cap_s=0.5, min_samples=3)
    world = run(
        Schedule(
            seed=5,
            world_size=4,
            group_size=4,
            num_steps=12,
            reply_deadline=reply_deadline,
            direct_bytes=direct_bytes,
            freezes=[(3, 2.5, 4.0)],
            compute_s=lambda rank, step: 1.0 + 0.01 * rank,
        )
    )
    for rank in range(3):
        assert (
            sum(wait_s for _, wait_s in world.models[rank].waits_s) <= 2 * 0.5 + 12 * 4 * LATENCY_S
        )
        without = [
            outcome for outcome in world.models[rank].closed if outcome.members.keys() == {0, 1, 2}
        ]
        complete = [
            outcome
            for outcome in world.models[rank].closed
            if outcome.members.keys() == {0, 1, 2, 3}
        ]
        assert 1 <= len(without) <= 5
        assert max(outcome.version for outcome in complete) > max(
            outcome.version for outcome in without
        )
    assert all(not counts.suspected for counts in world.counts)


@BOTH_WAYS
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_but_one_may_die(world_size: int, direct_bytes: int) -> None:
    world = run(
        Schedule(
            seed=6,
            world_size=world_size,
            group_size=world_size,
            num_steps=8,
            period=3,
            direct_bytes=direct_bytes,
            death_notice_s=0.2,
            kills=[(rank, 0.8 + 0.9 * rank) for rank in range(1, world_size)],
        )
    )
    survivor = world.models[0]
    assert survivor.step == 8
    assert world.counts[0].dead == set(range(1, world_size))
    assert all(wait_s <= 1.0 for _, wait_s in survivor.waits_s)


@BOTH_WAYS
def test_a_version_that_waits_for_all_waits_for_suspected_ranks(direct_bytes: int) -> None:
    world = run(
        Schedule(
            seed=10,
            world_size=3,
            group_size=3,
            num_steps=2,
            period=2,
            quorum=1.0,
            direct_bytes=direct_bytes,
            freezes=[(2, 0.5, 10.0)],
        )
    )
    for model, counts in zip(world.models[:2], world.counts[:2], strict=True):
        assert counts.suspicions >= 1
        closed = {outcome.version: outcome for outcome in model.closed}
        assert model.closed_at_s[0] < 3.0
        assert model.closed_at_s[1] > 10.0
        assert all(closed[1].members[rank].fresh for rank in range(3))


def test_a_rank_that_has_finished_still_contributes() -> None:
    world = run(
        Schedule(
            seed=7,
            world_size=3,
            group_size=3,
            num_steps=3,
            compute_s=lambda rank, step: 0.1 if rank == 0 else 10.0 + rank,
        )
    )
    last = world.models[1].closed[-1]
    assert world.models[1].closed_at_s[last.version] > 30.0
    assert last.members.keys() == {0, 1, 2}


@BOTH_WAYS
def test_a_rank_that_takes_no_more_steps_is_not_waited_for_and_still_contributes(
    direct_bytes: int,
) -> None:
    world = run(
        Schedule(
            seed=8,
            world_size=3,
            group_size=2,
            num_steps=4,
            period=1,
            quorum=1.0,
            direct_bytes=direct_bytes,
            rests={2: 1},
            compute_s=lambda rank, step: [1.0, 2.0, 2.0 if step == 0 else 50.0][rank],
        )
    )
    for model in world.models[:2]:
        assert sum(wait_s for _, wait_s in model.waits_s) <= 4 * (1.0 + 4 * LATENCY_S)
        assert all(outcome.members.keys() == {0, 1, 2} for outcome in model.closed)
    assert [outcome.members[2].fresh for outcome in world.models[0].closed] == [
        True,
        False,
        False,
        False,
    ]


@BOTH_WAYS
def test_counters_are_the_largest_of_those_that_are_in(direct_bytes: int) -> None:
    world = run(
        Schedule(
            seed=9,
            world_size=3,
            group_size=3,
            num_steps=2,
            direct_bytes=direct_bytes,
            compute_s=lambda rank, step: [1.0, 1.0, 10.0][rank],
        )
    )
    for model in world.models:
        for version in (0, 1):
            outcome = next(outcome for outcome in model.closed if outcome.version == version)
            assert all(piece.counters.tolist() == [version + 1, 0] for piece in outcome.pieces)
            assert all(not piece.counters.flags.writeable for piece in outcome.pieces)


class Recorder:
    """A port that contributes the same values every time."""

    def __init__(self, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        self.values = values
        self.outcomes: list[VersionResult] = []
        self.clock: Callable[[], float] = float
        self.closed_at_s: dict[int, float] = {}
        self.fresh = True
        self.invited: list[int] = []
        self.quorum_at: list[int] = []
        self.state: Contribution | None = None
        self.received: dict[int, Contribution | None] = {}
        self.marked_dead: list[int] = []
        self.num_finals = 0
        self.num_ends = 0
        self.finalized: list[int] = []

    def contribute(self, version: int) -> Contribution | None:
        return Contribution(values=self.values, step=version + 1, fresh=self.fresh)

    def invite(self, version: int) -> None:
        self.invited.append(version)

    def quorum_arrived(self, version: int) -> None:
        self.quorum_at.append(version)

    def close_version(self, outcome: VersionResult) -> None:
        self.outcomes.append(outcome)
        self.closed_at_s[outcome.version] = self.clock()

    def merge_late(self, version: int, piece: Piece) -> None:
        raise AssertionError(f"{piece} of version {version} was not owed")

    def snapshot(self) -> Contribution | None:
        return self.state

    def receive_model(self, sender: int, state: Contribution | None) -> None:
        self.received[sender] = state

    def finalize_version(self, version: int) -> None:
        self.finalized.append(version)

    def end_training(self) -> None:
        self.num_ends += 1

    def mark_dead(self, rank: int) -> None:
        self.marked_dead.append(rank)

    def mark_final(self) -> None:
        self.num_finals += 1


def settings_of(num_members: int, num_elements: int = 4, rank: int = 0) -> ProtocolSettings:
    members = tuple(range(num_members))
    return ProtocolSettings(
        members=members,
        generation=GENERATION,
        num_elements=num_elements,
        group_of=partial(group_of_version, rank=rank, members=members, group_size=2),
    )


def test_a_world_of_one_averages_with_itself() -> None:
    solo, port = SingleRank(), Recorder(np.arange(4, dtype=np.float32))
    for version in (0, 1, 0, 1):
        solo.start(Post(arrive(version, generation=GENERATION)), SERVE)
    solo.start(Post(finish(generation=GENERATION)), SERVE)
    counts = solo.run(RoundManager(0, settings_of(1), port).serve(), SERVE)
    assert counts == ProtocolCounts(stopped={0})
    assert [outcome.version for outcome in port.outcomes] == [0, 1]
    for outcome in port.outcomes:
        assert outcome.pieces[0].average[:].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert outcome.pieces[0].sum_of_weights == 1.0


def answer_to(message: Payload) -> tuple[ProtocolCounts | OffbeatError, Recorder]:
    """What becomes of rank 0 when rank 1 sends `message` and leaves."""
    port = Recorder(np.ones(4, np.float32))
    cluster = VirtualCluster(2, watch_all=False, link=VirtualLink(latency_s=LATENCY_S))

    def work() -> Collective[ProtocolCounts]:
        yield Post(finish(generation=GENERATION))
        return (yield from RoundManager(0, settings_of(2), port).serve())

    def intrude() -> Collective[ProtocolCounts]:
        yield Send(0, message)
        yield RecvAny(frozenset({0}))
        cluster.leave(1)
        return ProtocolCounts()

    return cluster.outcomes([work(), intrude()], channel=SERVE)[0], port


def part(**changes: object) -> ModelMessage:
    options: dict[str, object] = {
        "kind": MessageKind.CHUNK,
        "generation": GENERATION,
        "version": 0,
        "step": 1,
        "weight": 1.0,
        "participants": 0b11,
        "num_elements": 4,
        "values": np.zeros(4, np.float32),
    }
    # tests name fields that exist
    return ModelMessage(**(options | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (b"not a message", "80 bytes or more"),
        (part().to_bytes()[:-1], "announces"),
        (part(num_elements=5, values=np.zeros(5, np.float32)).to_bytes(), "same model"),
        (part(values=np.zeros(4, np.float64)).to_bytes(), "same model"),
        (part(values=np.zeros(3, np.float32)).to_bytes(), "same model"),
        (part(counters=np.zeros(1, np.int64)).to_bytes(), "same model"),
        (part(kind=MessageKind.AVERAGE).to_bytes(), "without owners"),
        (
            part(kind=MessageKind.MODEL_REPLY, values=np.zeros(3, np.float32)).to_bytes(),
            "same model",
        ),
        (
            part(kind=MessageKind.MODEL_REPLY, counters=np.zeros(1, np.int64)).to_bytes(),
            "same model",
        ),
        (stop_stepping(generation=GENERATION), "which it cannot"),
        (fetch_model(None, generation=GENERATION), "which it cannot"),
        (arrive(0, generation=GENERATION), "which it cannot"),
    ],
)
def test_a_message_that_cannot_be_right_is_one_clear_error_and_touches_no_model(
    message: Payload, complaint: str
) -> None:
    outcome, port = answer_to(message)
    assert isinstance(outcome, WireError)
    assert complaint in str(outcome)
    assert port.outcomes == []


def test_a_message_of_another_generation_is_ignored() -> None:
    outcome, port = answer_to(part(generation=GENERATION + 1).to_bytes())
    assert outcome == ProtocolCounts(dead={1}, stopped={0})
    assert port.outcomes == []


def test_a_message_from_outside_the_group_is_an_error() -> None:
    def wrong_group(version: int) -> VersionGroup:
        return VersionGroup(ranks=(0, 2))

    settings = settings_of(3)
    settings = ProtocolSettings(
        members=settings.members, generation=GENERATION, num_elements=4, group_of=wrong_group
    )
    cluster = VirtualCluster(3, watch_all=False)

    def intrude() -> Collective[ProtocolCounts]:
        yield Send(0, part().to_bytes())
        return ProtocolCounts()

    def idle() -> Collective[ProtocolCounts]:
        yield Post(b"")
        return ProtocolCounts()

    work = [RoundManager(0, settings, Recorder(np.ones(4, np.float32))).serve(), intrude(), idle()]
    outcome = cluster.outcomes(work, channel=SERVE)[0]
    assert isinstance(outcome, WireError)
    assert "same options" in str(outcome)


def test_ranks_that_wait_for_all_at_different_versions_do_not_wait_for_ever() -> None:
    cluster = VirtualCluster(2, watch_all=False)
    ports = [Recorder(np.full(4, float(rank), np.float32)) for rank in range(2)]
    settings = ProtocolSettings(
        members=(0, 1),
        generation=GENERATION,
        num_elements=4,
        group_of=lambda _: VersionGroup(ranks=(0, 1), min_arrivals=2),
    )

    def work(rank: int, versions: tuple[int, ...]) -> Collective[ProtocolCounts]:
        for version in versions:
            yield Post(arrive(version, generation=GENERATION))
        yield Post(finish(generation=GENERATION))
        return (yield from RoundManager(rank, settings, ports[rank]).serve())

    cluster.run([work(0, (1,)), work(1, (0, 1))], channel=SERVE)
    for port in ports:
        assert {outcome.version for outcome in port.outcomes} == {0, 1}
        assert [outcome.pieces[0].average[:].tolist() for outcome in port.outcomes] == [
            [0.5] * 4
        ] * 2


@BOTH_WAYS
@pytest.mark.parametrize("rests", [False, True])
def test_a_rank_that_has_passed_a_version_does_not_count_for_ranks_that_have_not_arrived(
    direct_bytes: int, rests: bool
) -> None:
    cluster = VirtualCluster(3, watch_all=False)
    ports = [Recorder(np.full(6, float(rank), np.float32)) for rank in range(3)]
    ports[0].fresh = False
    for port in ports:
        port.clock = lambda: cluster.now_s
    settings = ProtocolSettings(
        members=(0, 1, 2),
        generation=GENERATION,
        num_elements=6,
        direct_bytes=direct_bytes,
        group_of=lambda _: VersionGroup(ranks=(0, 1, 2), min_arrivals=3),
    )

    def arrivals(version: int, when_s: float) -> Collective[None]:
        yield Sleep(when_s)
        yield Post(arrive(version, generation=GENERATION))
        if rests:
            yield Post(stop_stepping(generation=GENERATION))
        yield Sleep(60.0)
        yield Post(finish(generation=GENERATION))

    for rank, (version, when_s) in enumerate([(5, 1.0), (0, 2.0), (0, 50.0)]):
        cluster.begin(rank, arrivals(version, when_s), channel=SERVE)
    cluster.run(
        [RoundManager(rank, settings, port).serve() for rank, port in enumerate(ports)],
        channel=SERVE,
    )
    for port in ports:
        first = next(outcome for outcome in port.outcomes if outcome.version == 0)
        assert port.closed_at_s[0] == 50.0
        assert {rank: note.fresh for rank, note in first.members.items()} == {
            0: False,
            1: True,
            2: True,
        }


def fetch_from_peers(
    *peers: int | None, dead: tuple[int, ...] = ()
) -> tuple[list[Recorder], list[ProtocolCounts | OffbeatError]]:
    """Rank 0 of three asks `peers` and finishes; rank 1 has a model and rank 2 has none."""
    cluster = VirtualCluster(3, watch_all=False, link=VirtualLink(latency_s=LATENCY_S))
    ports = [Recorder(np.zeros(4, np.float32)) for _ in range(3)]
    ports[1].state = Contribution(
        values=np.arange(4, dtype=np.float32),
        step=7,
        fresh=True,
        weight=2.5,
        counters=np.array([3, 2**40]),
    )

    def work(rank: int) -> Collective[ProtocolCounts]:
        posts = [fetch_model(peer, generation=GENERATION) for peer in peers] if rank == 0 else []
        for post in [*posts, finish(generation=GENERATION)]:
            yield Post(post)
        return (
            yield from RoundManager(
                rank, replace(settings_of(3, rank=rank), num_counters=2), ports[rank]
            ).serve()
        )

    for rank in dead:
        cluster.kill(rank)
    return ports, cluster.outcomes([work(rank) for rank in range(3)], channel=SERVE)


@pytest.mark.parametrize(("peer", "who_answers"), [(None, {1, 2}), (1, {1}), (2, {2})])
def test_a_rank_that_is_asked_sends_its_whole_model(
    peer: int | None, who_answers: set[int]
) -> None:
    ports, _ = fetch_from_peers(peer)
    assert ports[0].received.keys() == who_answers
    if 2 in who_answers:
        assert ports[0].received[2] is None
    if 1 in who_answers:
        state = ports[0].received[1]
        assert state is not None
        assert (state.step, state.fresh, state.weight) == (7, True, 2.5)
        assert state.values.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert state.values.dtype == np.float32
        assert state.counters.tolist() == [3, 2**40]
    assert all(not port.received for port in ports[1:])


def test_a_peer_that_is_dead_is_marked_dead() -> None:
    ports, outcomes = fetch_from_peers(2, None, dead=(2,))
    assert ports[0].marked_dead == [2]
    assert ports[0].received.keys() == {1}
    assert outcomes[0] == ProtocolCounts(dead={2}, stopped={0, 1})


def test_a_rank_is_told_once_that_its_model_is_final() -> None:
    port, solo = Recorder(np.ones(4, np.float32)), SingleRank()
    for message in (
        stop_stepping(generation=GENERATION),
        stop_stepping(generation=GENERATION),
        finish(generation=GENERATION),
    ):
        solo.start(Post(message), SERVE)
    assert solo.run(RoundManager(0, settings_of(1), port).serve(), SERVE).stopped == {0}
    assert port.num_finals == 1
