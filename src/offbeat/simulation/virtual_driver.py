"""One rank of a virtual cluster: how it begins operations, and the tickets that it gets for them.
And code that blocks, in a thread of its own, which runs only while the cluster waits for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import OffbeatError, PeerError, PeerTimeoutError
from offbeat.transport.driver import DONE, Driver, Finished, Pending, Ticket, Wrapper
from offbeat.transport.operations import (
    Collective,
    DenseOperation,
    Now,
    Operation,
    Post,
    Recv,
    RecvAny,
    Send,
    Sleep,
    perform,
)

if TYPE_CHECKING:
    from offbeat.simulation.virtual import VirtualCluster

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SleepUntil(Sleep):
    """Sleep until something has happened at this rank. Under a virtual clock alone.

    Attributes:
        over: whether it has; is asked whenever something happens at this rank.
    """

    seconds: float = math.inf
    over: Callable[[], bool] = bool


@dataclass(frozen=True, slots=True)
class _Beside(Sleep):
    """Begin `work`, and sleep until it is over."""

    seconds: float = math.inf
    work: Collective[None] = field(kw_only=True)


class VirtualDriver(Driver):
    """One rank of a `VirtualCluster`."""

    def __init__(self, cluster: VirtualCluster, rank: int) -> None:
        self.rank = rank
        self.world_size = cluster.world_size
        self.waiting_for = "nothing"
        self._cluster = cluster
        self._num_dense = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        cluster = self._cluster
        self.waiting_for = type(operation).__name__
        match operation:
            case Send(peer, payload):
                cluster.deliver(self.rank, peer, channel, payload)
                return DONE
            case Recv() | RecvAny():
                self.waiting_for += f" from {', '.join(map(str, sorted(operation.peers)))}"
                return _VirtualReceive(cluster, self.rank, operation, channel)
            case Post(payload):
                cluster.post(self.rank, channel, payload)
                return DONE
            case Now():
                return Finished(cluster.now_s)
            case _Beside(work=work):
                task = cluster.begin(self.rank, work, channel=channel)
                return VirtualTicket(lambda: task.over)
            case SleepUntil(math.inf, over):
                return VirtualTicket(over)
            case Sleep(seconds):
                limit = _Limit(cluster, self.rank, seconds)
                over = operation.over if isinstance(operation, SleepUntil) else bool
                return VirtualTicket(lambda: over() or limit.is_over)
            case DenseOperation():
                # The n-th dense operation of one rank belongs to the n-th of every other rank,
                # whatever its channel, as over gloo.
                number = self._num_dense
                self._num_dense += 1
                cluster.begin_dense(self.rank, number, operation)
                return VirtualTicket(
                    lambda: cluster.has_dense_result(number) or self._death() is not None,
                    lambda: self._dense_result(number),
                )

    def _death(self) -> tuple[int, str] | None:
        return self._cluster.dead_among(range(self.world_size))

    def _dense_result(self, number: int) -> Any:
        if not self._cluster.has_dense_result(number) and (death := self._death()) is not None:
            rank, why = death
            raise PeerError(f"rank {rank} failed during a collective: {why}", rank=rank)
        return self._cluster.take_dense_result(self.rank, number)

    def now_s(self, channel: int) -> float:
        return self._cluster.now_s

    def close(self) -> None:
        self._cluster.leave(self.rank)


class VirtualTicket:
    """An operation under way.

    Args:
        done: whether it is over.
        result: is asked once for what comes of it.
    """

    def __init__(self, done: Callable[[], bool], result: Callable[[], Any] = lambda: None) -> None:
        self.done, self._result = done, result

    def wait(self) -> Any:
        assert self.done(), "a virtual operation was waited for before it was done"
        return self._result()


class VirtualThread(Wrapper):
    """A driver for code that waits for its collectives, as training does, and the threads that run
    it. One thread of all is awake, so nothing depends on how an operating system schedules them.

    Args:
        inner: a driver of a virtual cluster, or a wrapper of one.

    Attributes:
        job: whose code runs, or whose collective goes on.
    """

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.job: Job | None = None

    def complete(self, pending: Pending[Any]) -> None:
        if not pending.poll():
            assert self.job is not None, "whoever waits is carried"
            self.job.wait_for(pending)

    @property
    def is_awake(self) -> bool:
        """Whether code runs, and not a collective that it waits for."""
        return self.job is not None and self.job.is_awake

    def condition(self) -> threading.Condition:
        return _ThreadCondition(self)

    def beside(
        self, job: Callable[[], None], *, name: str, levels: int = 0
    ) -> Callable[[], object]:
        return self.launch(perform(_Beside(work=self.carry(job))), 0).wait

    def catch_up(self) -> None:
        """Let the clock reach the moment at which the code is: now."""

    def carry(self, work: Callable[[], None]) -> Collective[None]:
        """Run `work`, which uses this driver, for `VirtualCluster.run`. Raises what it raises."""
        job = self.job = Job(work)
        job.thread.start()
        try:
            while (awaited := job.next_awaited()) is not None:
                while not awaited.over:
                    if not awaited.ready():
                        yield SleepUntil(over=awaited.ready)
                        self.job = job  # others of this rank have gone on meanwhile
                    with suppress(OffbeatError):  # which `work` gets
                        awaited.advance()
                job.go_on()
        finally:
            job.drop()
        if job.error is not None:
            raise job.error


class Job:
    """Code that runs in a thread of its own, while the cluster waits for it.

    Attributes:
        thread: its own.
        is_awake: whether it runs, and does not wait for a collective.
        error: what it has raised.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.is_awake = True
        self.error: BaseException | None = None
        self._awaited: Pending[Any] | None = None
        self._is_over = self._is_dropped = False
        self._may_go_on, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    def wait_for(self, pending: Pending[Any]) -> None:
        """Called by the code itself: let the cluster go on until `pending` is over."""
        self._awaited, self.is_awake = pending, False
        self._has_stopped.release()
        self._may_go_on.acquire()
        self.is_awake = True
        if self._is_dropped:
            raise SystemExit

    def next_awaited(self) -> Pending[Any] | None:
        """What the code waits for, once it does; None: it has come to its end."""
        self._has_stopped.acquire()
        return None if self._is_over else self._awaited

    def go_on(self) -> None:
        """What the code has waited for is over."""
        self._may_go_on.release()

    def drop(self) -> None:
        """Nobody waits for the code any more."""
        if not self._is_over:
            self._is_dropped = True
            self._may_go_on.release()
        self.thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - is raised where the cluster runs
            self.error = error
        self._is_over = True
        self._has_stopped.release()


class _ThreadCondition(threading.Condition):
    """Nobody else runs as long as the code of `thread` does, so there is nothing to lock; and
    whatever happens at a rank, all that waits there is looked at again.
    """

    def __init__(self, thread: VirtualThread) -> None:
        super().__init__()
        self._thread = thread

    def __enter__(self) -> bool:
        self._thread.catch_up()
        return True

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        return self.wait_for(bool, timeout)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        if not predicate():
            seconds = math.inf if timeout is None else timeout
            self._thread.run(perform(SleepUntil(seconds, lambda: bool(predicate()))), 0)
        return predicate()

    def notify_all(self) -> None:
        pass


class _Limit:
    """Whether so many seconds are over."""

    def __init__(self, cluster: VirtualCluster, rank: int, seconds: float) -> None:
        self.is_over = False
        self._cluster, self._rank = cluster, rank
        cluster.at(cluster.now_s + seconds, self._pass)

    def _pass(self) -> None:
        self.is_over = True
        self._cluster.touch(self._rank)


class _VirtualReceive:
    """A receive under way."""

    def __init__(
        self, cluster: VirtualCluster, rank: int, operation: Recv | RecvAny, channel: int
    ) -> None:
        self._takes_any = isinstance(operation, RecvAny)
        self._peers = operation.peers
        self._cluster, self._rank, self._channel = cluster, rank, channel
        timeout_s = operation.timeout_s
        self._limit = None if timeout_s is None else _Limit(cluster, rank, timeout_s)

    def done(self) -> bool:
        is_late = self._limit is not None and self._limit.is_over
        return bool(self._here()) or is_late or self._departure() is not None

    def wait(self) -> Any:
        cluster, who = self._cluster, f"rank {min(self._peers)}"
        if here := self._here():
            sender = cluster.choose(here) if self._takes_any else next(iter(here))
            payload = cluster.take(sender, self._rank, self._channel)
            return (sender, payload) if self._takes_any else payload
        if (departure := self._departure()) is not None:
            rank, why = departure
            awaited = "anybody" if self._takes_any else who
            raise PeerError(
                f"rank {rank} will send nothing more, and {awaited} was waited for: {why}",
                rank=rank,
            )
        assert self.done(), "a virtual receive was waited for before it was done"
        if self._takes_any:
            raise PeerTimeoutError("nothing came from anybody in time")
        raise PeerTimeoutError(f"nothing came from {who} in time", rank=min(self._peers))

    def _here(self) -> Set[int]:
        return self._cluster.senders(self._rank, self._channel) & self._peers

    def _departure(self) -> tuple[int, str] | None:
        """Who will send nothing more, and why."""
        if self._takes_any:
            return self._cluster.departed_among(self._peers)
        return self._cluster.dead_among(self._peers)
