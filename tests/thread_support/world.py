"""Drivers whose ranks are threads of one process, and whole sessions on them."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from offbeat import Session
from offbeat.codec import jit
from offbeat.errors import PeerError, UnsupportedError
from offbeat.strategies.base import Strategy
from offbeat.transport.connect import Connection
from offbeat.transport.driver import Driver, Finished, Ticket
from offbeat.transport.operations import DenseOperation, Now, Operation, Recv, Send

T = TypeVar("T")

WAIT_LIMIT_S = 60.0


class ThreadWorld:
    """What the threads share. Once a rank has raised, all that others wait for raises."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.dense: dict[int, dict[int, DenseOperation]] = defaultdict(dict)
        self.results: dict[int, list[Any]] = {}
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()


class ThreadDriver(Driver):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank, self.world_size = rank, world.world_size
        self.world = world
        self._num_dense = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        world = self.world
        match operation:
            case Send(peer, payload):
                with world.changed:
                    world.messages[self.rank, peer, channel].append(bytes(payload))
                    world.changed.notify_all()
                return Finished()
            case Recv(peer):
                # Under the lock: of two deques made at once, one would be lost with its message.
                with world.changed:
                    messages = world.messages[peer, self.rank, channel]
                return _Waiting(world, lambda: bool(messages), messages.popleft)
            case Now():
                return Finished(time.monotonic())
            case DenseOperation():
                # The n-th of one rank belongs to the n-th of every other one, as over gloo.
                number, self._num_dense = self._num_dense, self._num_dense + 1
                with world.changed:
                    begun = world.dense[number]
                    begun[self.rank] = operation
                    if len(begun) == world.world_size:
                        world.results[number] = operation.combine(
                            [begun[rank] for rank in range(world.world_size)]
                        )
                        world.changed.notify_all()
                return _Waiting(
                    world, lambda: number in world.results, lambda: self._take_result(number)
                )
            case _:
                raise UnsupportedError(f"{type(operation).__name__} is not made for threads")

    def _take_result(self, number: int) -> Any:
        """That of a dense operation, which the last rank to take it removes."""
        world = self.world
        result = world.results[number][self.rank]
        del world.dense[number][self.rank]
        if not world.dense[number]:
            del world.dense[number], world.results[number]
        return result

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        self.world.fail(f"rank {self.rank} failed: {reason}")

    def close(self) -> None:
        pass


class _Waiting:
    """An operation that needs a peer."""

    def __init__(
        self, world: ThreadWorld, is_there: Callable[[], bool], take: Callable[[], Any]
    ) -> None:
        self.world, self._is_there, self._take = world, is_there, take

    def done(self) -> bool:
        return self._is_there() or self.world.failure is not None

    def wait(self) -> Any:
        with self.world.changed:
            came = self.world.changed.wait_for(self.done, WAIT_LIMIT_S)
            assert came, f"a peer never came; all threads are here:\n{_stacks()}"
            if not self._is_there():
                raise PeerError(str(self.world.failure))
            return self._take()


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


@cache
def _compile_kernels() -> None:
    """Once, before ranks are threads: on a busy machine with nothing in numba's cache one of them
    would wait for its peers as long as that takes.
    """
    jit.warm()


def in_threads(
    world_size: int, job: Callable[[ThreadDriver], T], *, limit_s: float = 2 * WAIT_LIMIT_S
) -> list[T | BaseException]:
    """What `job` returns or raises on each rank. It may take `limit_s`."""
    _compile_kernels()
    world = ThreadWorld(world_size)
    outcomes: list[T | BaseException] = [AssertionError("the thread has not ended")] * world_size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = job(ThreadDriver(world, rank))
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            outcomes[rank] = error
            world.fail(f"rank {rank} raised {error!r}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return outcomes


def results_of(
    world_size: int, job: Callable[[ThreadDriver], T], *, limit_s: float = 2 * WAIT_LIMIT_S
) -> list[T]:
    """What `job` returns on each rank; raises what it raises."""
    outcomes = in_threads(world_size, job, limit_s=limit_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, PeerError):
            raise outcome
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]  # no exception is left


def session_on(
    driver: Driver, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> Session:
    """A session of this rank."""
    return Session(model, optimizer, strategy, connection=Connection(driver=driver, network=None))
