"""A slow network in user space: around the virtual driver for times, around sockets for bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offbeat.arithmetic.costs import LinkCost
from offbeat.errors import PeerTimeoutError, WireError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.driver import Driver
from offbeat.transport.operations import (
    AllGather,
    AllReduceTensor,
    Collective,
    Now,
    Recv,
    Send,
)
from offbeat.transport.peers import Peers
from offbeat_lab.emulation.delaying import Delaying
from transport_support.protocols import clock, receive, send

LATENCY_S = 0.5
BYTES_PER_S = 100.0


def delayed(driver: Driver) -> Driver:
    return Delaying(driver, LinkCost(alpha_s=LATENCY_S, beta_s_per_byte=1 / BYTES_PER_S))


def test_results_are_those_of_the_bare_driver() -> None:
    """Whatever the operation is."""

    def work(rank: int) -> Collective[tuple[bytes, list[float], list[bytes]]]:
        yield Send((rank + 1) % 3, bytes(rank + 1))
        message = yield Recv((rank - 1) % 3)
        total = yield AllReduceTensor(torch.full((3,), float(rank)))
        gathered = yield AllGather(bytes(rank))
        return bytes(message), total.tolist(), [bytes(payload) for payload in gathered]

    bare, slow = (
        VirtualCluster(3).run([work(rank) for rank in range(3)], wrap=wrap)
        for wrap in (lambda driver: driver, delayed)
    )
    assert slow == bare


def test_messages_of_one_sender_follow_each_other_and_it_does_not_wait_for_them() -> None:
    sent_at_s, taken = VirtualCluster(2).run(
        [send(1, [bytes(100), bytes(50)]), receive(0, 2)], wrap=delayed
    )
    assert sent_at_s == 0.0
    assert taken == [(1.5, bytes(100)), (2.5, bytes(50))]


def test_a_delay_comes_on_top_of_no_more_than_what_the_network_takes_anyway() -> None:
    cluster = VirtualCluster(2, link=VirtualLink(latency_s=10.0))
    _, taken = cluster.run([send(1, [b""]), receive(0, 1)], wrap=delayed)
    assert taken == [(10.0, b"")]


def test_a_message_that_is_not_due_in_time_is_left_for_the_next_receive() -> None:
    def impatient() -> Collective[tuple[float, float]]:
        with pytest.raises(PeerTimeoutError, match="before a message of rank 0 was due"):
            yield Recv(0, timeout_s=0.2)
        gave_up_s = yield Now()
        payload = yield Recv(0, timeout_s=1.0)
        assert bytes(payload) == b""
        return gave_up_s, (yield Now())

    _, times = VirtualCluster(2).run([send(1, [b""]), impatient()], wrap=delayed)
    assert times == (0.2, LATENCY_S)


def test_a_dense_collective_takes_as_long_as_a_ring_of_such_links() -> None:
    def work(rank: int) -> Collective[float]:
        yield AllReduceTensor(torch.zeros(100))
        return (yield Now())

    # 2 (P - 1) = 4 rounds of 0.5 s, and 4/3 of 400 bytes at 100 bytes a second
    expected_s = 4 * LATENCY_S + 534 / BYTES_PER_S
    assert (
        VirtualCluster(3).run([work(rank) for rank in range(3)], wrap=delayed)
        == [pytest.approx(expected_s)] * 3
    )


def test_a_delay_holds_over_real_sockets(open_mesh: Callable[[int], list[Peers]]) -> None:
    link = LinkCost(alpha_s=0.02, beta_s_per_byte=0.0)
    first, second = (Delaying(peers, link) for peers in open_mesh(2))
    before_s = first.run(clock(), 0)
    first.run(send(1, [b"x"]), 0)
    ((taken_at_s, payload),) = second.run(receive(0, 1), 0)
    assert payload == b"x"
    assert taken_at_s >= before_s + 0.02


def test_a_sender_that_is_not_delayed_is_an_error_on_the_receiver(
    open_mesh: Callable[[int], list[Peers]],
) -> None:
    first, second = open_mesh(2)
    first.run(send(1, [b"bare"]), 0)
    with pytest.raises(WireError, match="delay the driver of every rank"):
        delayed(second).run(receive(0, 1), 0)
