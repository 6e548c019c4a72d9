"""Wrappers, around the virtual driver where time matters and around real sockets where bytes do."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError, PeerError, PeerTimeoutError
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Counting, Driver
from offbeat.transport.operations import (
    AllGather,
    AllReduceTensor,
    Broadcast,
    Collective,
    DenseOperation,
    Recv,
    Send,
    Sleep,
    Traffic,
)
from offbeat.transport.peers import Peers
from rank_jobs.fault import killed
from ranks_support.process import StartProcess, start_process
from transport_support.protocols import clock, receive, send
from transport_support.wrappers import Failing, Recorded, RecordingDriver, ScriptedFault

__all__ = ["start_process"]


def everything(
    rank: int, world_size: int
) -> Collective[tuple[bytes, list[float], float, list[bytes]]]:
    """One operation of each kind."""
    yield Sleep(0.25)
    yield Send((rank + 1) % world_size, bytes(rank + 1))
    message = yield Recv((rank - 1) % world_size)
    total = yield AllReduceTensor(torch.full((3,), float(rank)))
    root = yield Broadcast(torch.tensor(float(rank)), 1)
    gathered = yield AllGather(bytes(rank))
    return bytes(message), total.tolist(), root.item(), [bytes(payload) for payload in gathered]


WRAPPINGS: dict[str, Callable[[Driver], Driver]] = {
    "counting": Counting,
    "failing": lambda driver: Failing(driver, []),
    "recording": RecordingDriver,
    "all": lambda driver: Counting(Failing(RecordingDriver(driver), [])),
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_results_are_those_of_the_bare_driver(name: str) -> None:
    bare = VirtualCluster(3).run([everything(rank, 3) for rank in range(3)])
    wrapped = VirtualCluster(3).run(
        [everything(rank, 3) for rank in range(3)], wrap=WRAPPINGS[name]
    )
    assert wrapped == bare


@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_wrapper_is_its_driver_in_rank_steps_and_closing(
    open_mesh: Callable[[int], list[Peers]], name: str
) -> None:
    first, second = open_mesh(2)
    inner = RecordingDriver(second)
    wrapper = WRAPPINGS[name](inner)
    wrapper.mark_step(5)
    assert (wrapper.rank, wrapper.world_size, inner.step) == (1, 2, 5)
    wrapper.close()
    with pytest.raises(PeerError, match="rank 1 finished"):
        first.start(Recv(1), 0).wait()


# Counting


def test_messages_are_counted_where_they_are_sent_and_where_they_are_taken(
    open_mesh: Callable[[int], list[Peers]],
) -> None:
    first, second = (Counting(peers) for peers in open_mesh(2))
    first.run(send(1, [b"four", bytes(100)]), 0)
    assert first.traffic[:4] == Traffic(bytes_sent=104, messages_sent=2)[:4]  # without the wait
    second.run(receive(0, 2), 0)
    assert second.traffic[:4] == Traffic(bytes_received=104, messages_received=2)[:4]


def test_time_spent_waiting_is_counted_even_when_it_ends_in_an_error(
    open_mesh: Callable[[int], list[Peers]],
) -> None:
    counting = Counting(open_mesh(2)[0])
    before_s = counting.run(clock(), 0)
    with pytest.raises(PeerTimeoutError):
        counting.run(receive(1, 1, timeout_s=0.02), 0)
    assert 0 < counting.traffic.wait_s <= counting.run(clock(), 0) - before_s
    assert counting.traffic.messages_received == 0
    assert counting.take_arrivals() == []


@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 20))
def test_over_all_ranks_a_ring_receives_what_it_sends(
    world_size: int, root: int, num_elements: int
) -> None:
    tensor = torch.zeros(num_elements)
    payloads = [bytes(rank * num_elements) for rank in range(world_size)]
    for operation, result in (
        (AllReduceTensor(tensor), tensor),
        (Broadcast(tensor, root % world_size), tensor),
        (AllGather(b""), payloads),
    ):
        shares = [
            operation.traffic(result, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert sum(share.bytes_sent for share in shares) == sum(
            share.bytes_received for share in shares
        )
        assert sum(share.messages_sent for share in shares) == sum(
            share.messages_received for share in shares
        )


def test_a_ring_of_four_moves_what_the_formulas_say() -> None:
    tensor = torch.zeros(100)

    def share(operation: DenseOperation, result: object, rank: int) -> tuple[int, int, int]:
        traffic = operation.traffic(result, rank=rank, world_size=4)
        return traffic.bytes_sent, traffic.bytes_received, traffic.messages_sent

    assert share(AllReduceTensor(tensor), tensor, 0) == (600, 600, 6)
    assert [share(Broadcast(tensor, 1), tensor, rank) for rank in (1, 2, 0)] == [
        (400, 0, 1),
        (400, 400, 1),
        (0, 400, 0),
    ]
    assert share(AllGather(b""), [bytes(1), bytes(10), bytes(100), bytes(1000)], 0) == (
        1101,
        1110,
        3,
    )


def test_the_late_rank_arrives_late_and_waits_least() -> None:
    counting: list[Counting] = []

    def wrap(driver: Driver) -> Driver:
        counting.append(Counting(driver))
        counting[-1].mark_step(7)
        return counting[-1]

    def work(rank: int) -> Collective[torch.Tensor]:
        yield Sleep(rank * 1.0)
        return (yield AllReduceTensor(torch.zeros(2)))

    VirtualCluster(3).run([work(rank) for rank in range(3)], channel=11, wrap=wrap)
    arrivals = [wrapper.take_arrivals() for wrapper in counting]
    assert arrivals == [[(7, 11, "AllReduce", float(rank), 2.0 - rank)] for rank in range(3)]
    assert [wrapper.take_arrivals() for wrapper in counting] == [[], [], []]


# Failing


def failing(*faults: ScriptedFault) -> Callable[[Driver], Driver]:
    return lambda driver: Failing(driver, faults)


def test_a_scripted_error_happens_at_its_rank_step_and_operation_once(
    open_mesh: Callable[[int], list[Peers]],
) -> None:
    fault = ScriptedFault(rank=1, step=2, operation=Recv, action="raise")
    first, second = (Failing(peers, [fault]) for peers in open_mesh(2))
    assert (first.waiting, second.waiting) == ([], [fault])
    for step in (1, 2):
        second.mark_step(step)
        first.run(send(1, [b"x"]), 0)
        if step == 2:
            with pytest.raises(
                PeerError, match="scripted fault: Recv of rank 1 failed in step 2"
            ) as caught:
                second.run(receive(0, 1), 0)
            assert caught.value.rank == 1
            assert second.waiting == []
        second.run(receive(0, 1), 0)


def test_a_scripted_error_reaches_the_protocol_which_may_survive_it() -> None:
    def stubborn() -> Collective[bytes]:
        try:
            payload = yield Recv(0)
        except PeerError:
            payload = yield Recv(0)
        return bytes(payload)

    fault = ScriptedFault(rank=1, step=0, operation=Recv, action="raise")
    assert VirtualCluster(2).run([send(1, [b"x"]), stubborn()], wrap=failing(fault))[1] == b"x"


def test_a_dropped_message_never_arrives_and_the_next_one_does() -> None:
    fault = ScriptedFault(rank=0, step=0, operation=Send, action="drop")
    _, taken = VirtualCluster(2).run(
        [send(1, [b"first", b"second"]), receive(0, 1)], wrap=failing(fault)
    )
    assert taken == [(0.0, b"second")]


@given(st.binary(min_size=1, max_size=40))
def test_a_corrupted_message_differs_by_one_bit_and_the_senders_own_bytes_do_not_change(
    payload: bytes,
) -> None:
    fault = ScriptedFault(rank=0, step=0, operation=Send, action="corrupt")
    mine = bytearray(payload)
    _, taken = VirtualCluster(2).run([send(1, [mine]), receive(0, 1)], wrap=failing(fault))
    differences = [a ^ b for a, b in zip(payload, taken[0][1], strict=True) if a != b]
    assert len(differences) == 1
    assert differences[0].bit_count() == 1
    assert mine == payload


def test_a_killed_rank_dies_as_from_outside(start_process: StartProcess) -> None:
    assert start_process(killed, 0, 1).wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("operation", "action", "complaint"),
    [
        (Recv, "drop", "Recv cannot be made to drop"),
        (AllReduceTensor, "corrupt", "AllReduceTensor cannot"),
        (Send, "explode", "allowed are raise"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(
    operation: type[Send], action: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ScriptedFault(rank=0, step=0, operation=operation, action=action)  # type: ignore[arg-type]


# RecordingDriver


def test_a_recording_is_the_schedule() -> None:
    recordings: list[RecordingDriver] = []

    def wrap(driver: Driver) -> Driver:
        recordings.append(RecordingDriver(driver))
        return recordings[-1]

    VirtualCluster(3).run([everything(rank, 3) for rank in range(3)], channel=4, wrap=wrap)
    assert recordings[1].operations == [
        Recorded("Sleep", None, 0, 4),
        Recorded("Send", 2, 2, 4),
        Recorded("Recv", 0, 1, 4),
        Recorded("AllReduce", None, 12, 4),
        Recorded("Broadcast", 1, 4, 4),
        Recorded("AllGather", None, 1, 4),
    ]
