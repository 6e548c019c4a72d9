"""A dense collective that is broken, or that a dead rank keeps waiting: what ends it, and whom the
error names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore

from offbeat.errors import ConfigError, PeerError
from offbeat.torch_private import new_gloo_backend
from offbeat.transport.backends import WAIT_LIMIT, Backend, gloo_device
from offbeat.transport.link import DEFAULT_S, SILENCE_VARIABLE, silence_s
from offbeat.transport.mesh import FINISHED
from offbeat.transport.operations import AllReduceTensor, Broadcast
from offbeat.transport.routed import LOOK_S, C10d, Routed, Watch
from offbeat.transport.sockets import SocketAddresses

LOOPBACK = "127.0.0.1"


def test_a_connection_that_gloo_reads_no_more_ends_too() -> None:
    store = HashStore()
    devices = [gloo_device(LOOPBACK) for _ in range(2)]
    first_at, second_at = (device.listens_at for device in devices)
    if first_at is None or second_at is None:
        pytest.skip("this platform does not list a process's descriptors")

    def opened(rank: int) -> Backend:
        return new_gloo_backend(
            store,
            rank,
            2,
            device=devices[rank].handle,
            connect_limit=timedelta(seconds=30),
            wait_limit=WAIT_LIMIT,
        )

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.map(opened, range(2))
    # What a collective leaves behind that failed in the middle of a message: gloo reads no further.
    receiving.recv([torch.empty(4)], 0, 7)
    sending.send([torch.ones(4)], 1, 7).wait()

    sockets = SocketAddresses(local=frozenset([second_at]), remote=frozenset([first_at]))
    driver = C10d(receiving, sockets=sockets)
    del receiving
    raised: list[PeerError] = []

    def wait_for_rank_0() -> None:
        try:
            driver.start(Broadcast(torch.empty(4), root=0), 0).wait()
        except PeerError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait_for_rank_0, daemon=True)
    waiting.start()
    driver.cut(PeerError("rank 0 is dead", rank=0))
    waiting.join(60)
    assert [error.rank for error in raised] == [0]
    driver.close()


class Broken:
    """The dense side, whose connections have just ended; and the ticket of each collective."""

    rank, world_size = 0, 3

    def __init__(self) -> None:
        self.explain: Callable[[PeerError], PeerError]

    def start(self, operation: object, channel: int) -> Broken:
        return self

    def wait(self) -> NoReturn:
        raise self.explain(PeerError("a connection failed during AllReduce"))

    def waits_for_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Messages:
    """The message side: rank 2 has left in good order, and nobody is dead."""

    rank = 0
    lost: frozenset[int] = frozenset()

    def dead(self) -> dict[int, str]:
        return {}

    def departures(self) -> dict[int, str]:
        return {2: FINISHED}

    def wait_for_death(self, timeout_s: float) -> dict[int, str]:
        raise AssertionError("nobody has died: this would wait for nothing")

    def close(self) -> None:
        pass


class QueuedWork:
    """NCCL's handle: a wait without a limit orders streams, one with a limit ends the communicator
    of what takes longer.
    """

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is not None:
            raise RuntimeError("Watchdog caught collective operation timeout")


class Nccl:
    """A backend whose work takes long."""

    def allreduce(self, tensors: object, options: object) -> QueuedWork:
        return QueuedWork()


class OnDevice(AllReduceTensor):
    """A sum of what would be on a GPU."""

    def begin(self, backends: C10d) -> Any:
        return Nccl().allreduce([self.tensor], None)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


def test_what_takes_long_on_a_device_is_waited_for_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronised: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            synchronised.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    cpu = new_gloo_backend(
        HashStore(),
        0,
        1,
        device=gloo_device(LOOPBACK).handle,
        connect_limit=timedelta(seconds=30),
        wait_limit=WAIT_LIMIT,
    )
    with closing(C10d(cpu, Nccl())) as driver:
        driver.start(AllReduceTensor(torch.ones(2)), 0).wait()
        assert not synchronised  # gloo's own
        driver.start(OnDevice(torch.ones(2)), 0).wait()
    assert synchronised == [torch.device("cuda", 1)]


def test_a_rank_that_has_left_early_is_named_at_once() -> None:
    dense: Any = Broken()
    messages: Any = Messages()
    with closing(Routed(dense, messages)) as routed:
        ticket = routed.start(AllReduceTensor(torch.zeros(1)), 0)
        with pytest.raises(PeerError, match="rank 2 finished and closed its connections") as raised:
            ticket.wait()
    assert raised.value.rank == 2


class Waiting:
    """Waits, for as long as it is told."""

    rank = 0

    def __init__(self, waits_for_s: float) -> None:
        self._waits_for_s = waits_for_s
        self.cause: PeerError | None = None
        self.was_cut = threading.Event()

    def waits_for_s(self) -> float:
        return self._waits_for_s

    def cut(self, cause: PeerError) -> None:
        self.cause = cause
        self.was_cut.set()


def test_a_wait_for_a_dead_rank_is_ended_by_its_name() -> None:
    dense: Any = Waiting(10 * LOOK_S)
    with closing(Watch(dense, lambda: {2: "is dead", 1: "aborted"})):
        assert dense.was_cut.wait(60)
    assert dense.cause is not None
    assert dense.cause.rank == 2
    assert str(dense.cause).startswith("rank 2 is dead (rank 0 waited for it")


def test_who_waits_too_long_where_nobody_may_is_ended_without_a_name() -> None:
    dense: Any = Waiting(10.0)
    with closing(Watch(dense, dict, limit_s=5.0)):
        assert dense.was_cut.wait(60)
    assert dense.cause is not None
    assert dense.cause.rank is None


def test_a_rank_that_does_not_wait_asks_nobody_and_slowness_is_no_death() -> None:
    asked = threading.Event()

    def nobody() -> dict[int, str]:
        asked.set()
        return {}

    slow: Any = Waiting(1000.0)
    with closing(Watch(slow, nobody)):
        assert asked.wait(60)
    assert not slow.was_cut.is_set()


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1e7", "inf", "nan"])
def test_a_silence_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, value)
    with pytest.raises(ConfigError, match=SILENCE_VARIABLE):
        silence_s()


def test_silence_is_tolerated_for_as_long_as_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SILENCE_VARIABLE, raising=False)
    assert silence_s() == DEFAULT_S
    monkeypatch.setenv(SILENCE_VARIABLE, "2.5")
    assert silence_s() == 2.5
