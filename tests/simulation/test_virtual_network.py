"""Ports: what waits for what, on links and racks that differ, and dense operations among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat.simulation.virtual import (
    DenseLinks,
    Tree,
    VirtualCluster,
    VirtualLink,
    VirtualRacks,
)
from offbeat.simulation.virtual_driver import SleepUntil
from offbeat.transport.operations import (
    AllReduceTensor,
    Broadcast,
    Collective,
    DenseOperation,
    Now,
    Recv,
    Send,
    Sleep,
)

FAST, SLOW = VirtualLink(bytes_per_s=1000.0), VirtualLink(bytes_per_s=100.0)


def exchange(sends: list[int], receives: list[int], num_bytes: int) -> Collective[float]:
    for peer in sends:
        yield Send(peer, bytes(num_bytes))
    for peer in receives:
        yield Recv(peer)
    return float((yield Now()))


@pytest.mark.parametrize("links", [(FAST, SLOW), (SLOW, FAST)])
def test_a_message_takes_the_time_of_its_slowest_port_once(
    links: tuple[VirtualLink, VirtualLink],
) -> None:
    cluster = VirtualCluster(2, link=links)
    assert cluster.run([exchange([1], [], 500), exchange([], [0], 500)])[1] == pytest.approx(5.0)


def test_messages_of_several_senders_wait_for_the_receiver() -> None:
    cluster = VirtualCluster(4, link=FAST)
    work = [exchange([], [1, 2, 3], 500), *(exchange([0], [], 500) for _ in range(3))]
    assert cluster.run(work)[0] == pytest.approx(1.5)


def test_a_rack_shares_one_connection_and_traffic_within_it_does_not_pass_there() -> None:
    racks = VirtualRacks(rack_of=(0, 0, 1, 1), bytes_per_s=1000.0)
    across = VirtualCluster(4, link=FAST, racks=racks)
    work = [exchange([2], [], 500), exchange([3], [], 500)]
    work += [exchange([], [0], 500), exchange([], [1], 500)]
    assert max(across.run(work)) == pytest.approx(1.0)
    within = VirtualCluster(4, link=FAST, racks=racks)
    pairs = [exchange([rank ^ 1], [rank ^ 1], 500) for rank in range(4)]
    assert max(within.run(pairs)) == pytest.approx(0.5)


def test_from_rack_to_rack_a_message_takes_longer_by_its_latency() -> None:
    racks = VirtualRacks(rack_of=(0, 0, 1, 1), bytes_per_s=1e12, latency_s=2.0)
    cluster = VirtualCluster(4, link=FAST, racks=racks)
    work = [exchange([1, 2], [], 500), *(exchange([], [0], 500) for _ in range(2))]
    near_s, far_s = cluster.run([*work, exchange([], [], 0)])[1:3]
    assert (near_s, far_s) == pytest.approx((0.5, 3.0))


def test_every_message_occupies_its_ports_besides_its_bytes() -> None:
    cluster = VirtualCluster(2, link=VirtualLink(latency_s=1.0, message_s=0.125))
    work = [exchange([1] * 8, [], 0), exchange([], [0] * 8, 0)]
    assert cluster.run(work)[1] == pytest.approx(1.0 + 8 * 0.125)


def test_links_are_one_a_rank() -> None:
    with pytest.raises(ConfigError, match="2 links were given for 3 ranks"):
        VirtualCluster(3, link=[FAST, SLOW])


def ring_all_reduce(rank: int, world_size: int, num_bytes: int) -> Collective[float]:
    """An oracle: gloo's ring, message by message, two of which are under way at a time."""
    half = bytes(num_bytes // world_size // 2)
    before, behind = (rank - 1) % world_size, (rank + 1) % world_size
    yield Send(behind, half)
    yield Send(behind, half)
    for _ in range(2 * (2 * (world_size - 1) - 1)):
        yield Recv(before)
        yield Send(behind, half)
    yield Recv(before)
    yield Recv(before)
    return float((yield Now()))


def one_dense(operation: DenseOperation) -> Collective[float]:
    yield operation
    return float((yield Now()))


@pytest.mark.parametrize(("world_size", "rack_size"), [(2, 2), (5, 5), (64, 64), (16, 4)])
def test_an_all_reduce_takes_as_long_as_a_ring_of_messages(world_size: int, rack_size: int) -> None:
    racks = VirtualRacks(
        rack_of=tuple(rank // rack_size for rank in range(world_size)),
        bytes_per_s=500.0,
        latency_s=1.5,
    )
    links = [
        VirtualLink(latency_s=0.25, message_s=0.01, bytes_per_s=100.0 if rank == 1 else 1000.0)
        for rank in range(world_size)
    ]
    num_bytes = 64 * world_size
    events = VirtualCluster(world_size, link=links, racks=racks).run(
        [ring_all_reduce(rank, world_size, num_bytes) for rank in range(world_size)]
    )
    dense = VirtualCluster(world_size, link=links, racks=racks).run(
        [one_dense(AllReduceTensor(torch.zeros(num_bytes // 4))) for _ in range(world_size)]
    )
    assert max(dense) == pytest.approx(max(events), rel=0.06)


class GlooRing:
    """Another oracle: the loop of gloo's ring. A part leaves when it is due and its receiver has
    said that it is ready, which it says before each part that it waits for; two are under way.

    Args:
        world_size: number of ranks.
        num_bytes: of the tensor.
        most_bytes: of a part.
    """

    READY, DUE, PART = 7, 8, 9

    def __init__(self, world_size: int, num_bytes: int, most_bytes: int) -> None:
        chunk_bytes = num_bytes // world_size
        num_parts = max(2, -(-chunk_bytes // most_bytes))
        self.world_size = world_size
        self.part = bytes(chunk_bytes // num_parts)
        self.num_messages = (world_size - 1) * num_parts

    def send(self, cluster: VirtualCluster, rank: int) -> Collective[None]:
        behind = (rank + 1) % self.world_size
        for _ in range(2 * self.num_messages):
            yield from self.wait(cluster, rank, self.DUE, rank)
            yield from self.wait(cluster, rank, self.READY, behind)
            cluster.deliver(rank, behind, self.PART, self.part)

    def receive(self, cluster: VirtualCluster, rank: int) -> Collective[float]:
        before = (rank - 1) % self.world_size
        for _ in range(2):  # a reduce-scatter, and when it is over an all-gather
            for number in range(self.num_messages + 2):
                if number >= 2:
                    yield from self.wait(cluster, rank, self.PART, before)
                if number < self.num_messages:
                    cluster.deliver(rank, before, self.READY, b"")
                    cluster.post(rank, self.DUE, b"")
        return float((yield Now()))

    @staticmethod
    def wait(cluster: VirtualCluster, rank: int, channel: int, source: int) -> Collective[None]:
        yield SleepUntil(over=lambda: source in cluster.senders(rank, channel))
        cluster.take(source, rank, channel)


@pytest.mark.parametrize("world_size", [2, 5, 16])
@pytest.mark.parametrize(("rate", "parts"), [(1e6, 1), (1e8, 1), (1e8, 5), (1e9, 2)])
def test_receivers_that_announce_themselves_cost_a_round_trip_a_round(
    world_size: int, rate: float, parts: int
) -> None:
    link = VirtualLink(latency_s=0.01, bytes_per_s=rate)
    most_bytes = 1 << 20
    num_bytes = 2 * most_bytes * world_size * parts
    ring = GlooRing(world_size, num_bytes, most_bytes)
    messages = VirtualCluster(world_size, link=link)
    for rank in range(world_size):
        messages.begin(rank, ring.send(messages, rank), channel=1)
    events = messages.run([ring.receive(messages, rank) for rank in range(world_size)])
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    cluster = VirtualCluster(
        world_size, link=link, dense=DenseLinks(announced=True), weightless=True
    )
    ended_s: list[float] = []

    def dense() -> Collective[None]:
        yield SummedNowhere(tensor)
        ended_s.append(float((yield Now())))

    cluster.run([dense() for _ in range(world_size)])
    assert max(ended_s) == pytest.approx(max(events), rel=0.08)


class SummedNowhere(AllReduceTensor):
    """An all-reduce of a tensor without content."""

    @classmethod
    @override
    def combine(cls, operations: Sequence[Any]) -> list[Any]:
        return [None] * len(operations)


def tree_broadcast(rank: int, world_size: int, num_bytes: int) -> Collective[float]:
    distance = 1 << (world_size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0 and rank + distance < world_size:
            yield Send(rank + distance, bytes(num_bytes))
        elif rank % (2 * distance) == distance:
            yield Recv(rank - distance)
    return float((yield Now()))


@pytest.mark.parametrize("world_size", [2, 7, 16])
def test_a_broadcast_takes_as_long_as_a_tree_of_messages(world_size: int) -> None:
    link = VirtualLink(latency_s=0.25, bytes_per_s=1000.0)
    events = VirtualCluster(world_size, link=link).run(
        [tree_broadcast(rank, world_size, 400) for rank in range(world_size)]
    )
    dense = VirtualCluster(world_size, link=link).run(
        [one_dense(Broadcast(torch.zeros(100), 0)) for _ in range(world_size)]
    )
    assert max(dense) == pytest.approx(max(events))


@pytest.mark.parametrize(("world_size", "transfers"), [(2, 1), (3, 2), (4, 2 + 1), (8, 3 + 2 + 1)])
def test_gloos_root_sends_a_broadcast_to_several_at_once(world_size: int, transfers: int) -> None:
    """They share its port, so all of them have it when the last one has."""
    link = VirtualLink(bytes_per_s=400.0)
    ends_s = VirtualCluster(world_size, link=link, dense=DenseLinks(announced=True)).run(
        [one_dense(Broadcast(torch.zeros(100), 0)) for _ in range(world_size)]
    )
    assert max(ends_s) == pytest.approx(transfers)


def test_one_rank_that_stands_for_all_takes_part_in_their_dense_operations() -> None:
    link = VirtualLink(latency_s=0.25, bytes_per_s=1000.0)
    for operation in (Broadcast(torch.zeros(100), 3), AllReduceTensor(torch.zeros(100))):
        all_s = VirtualCluster(5, link=link).run([one_dense(operation) for _ in range(5)])
        one_s = VirtualCluster(1, link=link, dense=DenseLinks(ranks=5)).run([one_dense(operation)])
        assert one_s == pytest.approx([max(all_s)])


TREE = Tree(hop_s=0.5, in_rack_s=0.125, share=0.8)


def test_an_all_reduce_of_few_bytes_goes_up_a_tree_and_one_of_many_around_the_ring() -> None:
    link = VirtualLink(latency_s=0.25, bytes_per_s=1000.0)
    dense = DenseLinks(hop_s=0.5, trees=(TREE,))

    def seconds(num_elements: int) -> float:
        operations = [one_dense(AllReduceTensor(torch.zeros(num_elements))) for _ in range(16)]
        return max(VirtualCluster(16, link=link, dense=dense).run(operations))

    assert seconds(100) == pytest.approx(2 * 4 * (0.5 + 0.25) + 2 * 400 / 800)
    # 30 rounds of a sixteenth, where bytes take longer than the way of half of them.
    assert seconds(40_000) == pytest.approx(30 * (0.5 + 10.0) + 0.25)


def test_a_tree_has_a_chain_within_a_rack_and_hops_between_racks() -> None:
    racks = VirtualRacks(rack_of=(0,) * 4 + (1,) * 4, bytes_per_s=100.0, latency_s=1.0)
    link = VirtualLink(latency_s=0.25, bytes_per_s=1000.0)
    cluster = VirtualCluster(
        8, link=link, racks=racks, dense=DenseLinks(hop_s=100.0, in_rack_s=100.0, trees=(TREE,))
    )
    ends_s = cluster.run([one_dense(AllReduceTensor(torch.zeros(100))) for _ in range(8)])
    ways_s = 3 * (0.125 + 0.25) + (0.5 + 1.25)
    assert max(ends_s) == pytest.approx(2 * ways_s + 2 * 400 / 0.8 / 100)


def test_dense_operations_contend_with_messages_and_with_each_other() -> None:
    def both(rank: int) -> Collective[float]:
        yield Send(1 - rank, bytes(1000))
        yield AllReduceTensor(torch.zeros(250))
        return float((yield Now()))

    cluster = VirtualCluster(2, link=FAST)
    assert cluster.run([both(0), both(1)]) == pytest.approx([2.0, 2.0])


def test_a_collective_begun_within_a_run_goes_on_while_its_rank_sleeps() -> None:
    cluster = VirtualCluster(2, link=FAST)

    def work(rank: int) -> Collective[float]:
        peers = [1 - rank]
        exchanged = cluster.begin(rank, exchange(peers, peers, 1000), channel=1)
        yield Sleep(0.75)
        yield SleepUntil(over=lambda: exchanged.over)
        return float((yield Now()))

    assert cluster.run([work(0), work(1)]) == pytest.approx([1.0, 1.0])
