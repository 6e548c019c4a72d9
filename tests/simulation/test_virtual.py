"""The virtual driver: deterministic from its seed, with a clock that follows the link, and honest
about deadlocks.
"""

from __future__ import annotations

import pytest
import torch

from offbeat.errors import PeerError, PeerTimeoutError
from offbeat.simulation.virtual import DeadlockError, VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.transport.driver import Pending
from offbeat.transport.operations import (
    AllGather,
    AllReduceTensor,
    Broadcast,
    Collective,
    Now,
    Recv,
    Send,
    Sleep,
)


def swap(peer: int, mine: bytes) -> Collective[bytes]:
    yield Send(peer, mine)
    theirs = yield Recv(peer)
    return bytes(theirs)


def test_two_ranks_swap() -> None:
    assert VirtualCluster(2).run([swap(1, b"a"), swap(0, b"b")]) == [b"b", b"a"]


def test_the_clock_counts_latency_and_rate() -> None:
    def send() -> Collective[float]:
        yield Send(1, bytes(1000))
        yield Send(1, bytes(500))
        return 0.0

    def receive() -> Collective[float]:
        yield Recv(0)
        yield Recv(0)
        return float((yield Now()))

    link = VirtualLink(latency_s=0.25, bytes_per_s=1000)
    assert VirtualCluster(2, link=link).run([send(), receive()])[1] == pytest.approx(0.25 + 1.5)


def arrival_order(seed: int) -> list[int]:
    order: list[int] = []

    def work(rank: int) -> Collective[None]:
        for _ in range(3):
            yield Sleep(0.0)
            order.append(rank)

    VirtualCluster(5, seed=seed).run([work(rank) for rank in range(5)])
    return order


def test_a_seed_replays_its_schedule_and_other_seeds_draw_others() -> None:
    assert arrival_order(7) == arrival_order(7)
    assert len({tuple(arrival_order(seed)) for seed in range(10)}) == 10


def test_messages_between_two_ranks_stay_in_order_under_jitter() -> None:
    def send() -> Collective[list[bytes]]:
        for number in range(50):
            yield Send(1, bytes([number]))
        return []

    def receive() -> Collective[list[bytes]]:
        received = []
        for _ in range(50):
            received.append((yield Recv(0)))
        return received

    link = VirtualLink(latency_s=0.01, bytes_per_s=1e6, jitter_s=1.0)
    assert VirtualCluster(2, seed=3, link=link).run([send(), receive()])[1] == [
        bytes([number]) for number in range(50)
    ]


def test_two_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    def wait(peer: int) -> Collective[None]:
        yield Recv(peer)

    with pytest.raises(DeadlockError, match="rank 0: Recv from 1, rank 1: Recv from 0"):
        VirtualCluster(2).run([wait(1), wait(0)])


def test_a_timeout_loses_nothing() -> None:
    def late() -> Collective[bytes]:
        yield Sleep(2.0)
        yield Send(1, b"late")
        return b""

    def impatient() -> Collective[bytes]:
        with pytest.raises(PeerTimeoutError):
            yield Recv(0, timeout_s=1.0)
        return bytes((yield Recv(0)))

    assert VirtualCluster(2).run([late(), impatient()])[1] == b"late"


def test_a_failing_rank_fails_those_who_wait_and_names_itself() -> None:
    def fail() -> Collective[None]:
        yield Sleep(1.0)
        raise PeerError("disk full")

    def wait() -> Collective[None]:
        yield Recv(0)

    outcomes = VirtualCluster(3).outcomes([wait(), fail(), wait()])
    assert [getattr(outcome, "rank", None) for outcome in (outcomes[0], outcomes[2])] == [1, 1]
    assert "disk full" in str(outcomes[0])


def test_dense_collectives() -> None:
    def work(rank: int) -> Collective[tuple[float, float, list[bytes]]]:
        total = yield AllReduceTensor(torch.full((2,), float(rank)))
        root = yield Broadcast(torch.full((2,), float(rank)), 2)
        everyone = yield AllGather(bytes([rank]) * rank)
        return float(total[0]), float(root[1]), everyone

    expected = (3.0, 2.0, [b"", b"\1", b"\2\2"])
    assert VirtualCluster(3).run([work(rank) for rank in range(3)]) == [expected] * 3


def test_dense_collectives_meet_in_the_order_in_which_ranks_begin_them_whatever_their_channel() -> (
    None
):
    cluster = VirtualCluster(2)
    first, second = (torch.zeros(1), torch.ones(1)), (torch.zeros(1), torch.ones(1))
    begun = [
        (
            cluster.drivers[0].start(AllReduceTensor(first[0]), 5),
            cluster.drivers[0].start(AllReduceTensor(first[1]), 6),
        ),
        (
            cluster.drivers[1].start(AllReduceTensor(second[1]), 6),
            cluster.drivers[1].start(AllReduceTensor(second[0]), 5),
        ),
    ]

    def finish() -> Collective[None]:
        yield Sleep(1.0)

    cluster.run([finish(), finish()])
    assert all(ticket.done() for tickets in begun for ticket in tickets)
    assert [float(tensor) for tensor in (*first, *second)] == [1.0, 1.0, 1.0, 1.0]


def test_a_thread_of_a_rank_waits_for_what_another_one_does_beside_it() -> None:
    """One receives what comes, the other waits until it is there, or for so long."""
    cluster = VirtualCluster(2, link=VirtualLink(latency_s=1.0))
    thread = VirtualThread(cluster.drivers[0])
    came: list[bytes] = []
    seen: list[object] = []

    def receive() -> Collective[None]:
        came.append(bytes((yield Recv(1))))
        yield Sleep(2.0)

    def job() -> None:
        changed = thread.condition()
        receiving = Pending(thread, receive(), 7)

        def beside() -> None:
            receiving.wait()
            seen.append("over")

        join = thread.beside(beside, name="receiver")
        with changed:
            seen.append((changed.wait_for(lambda: bool(came), 0.5), thread.now_s(0)))
            seen.append((changed.wait_for(lambda: bool(came)), thread.now_s(0)))
        join()
        seen.append(thread.now_s(0))

    def send() -> Collective[None]:
        yield Send(0, b"x")

    def sender() -> Collective[None]:
        yield Now()
        cluster.begin(1, send(), channel=7)

    cluster.run([thread.carry(job), sender()])
    assert seen == [(False, 0.5), (True, 1.0), "over", 3.0]
