"""All ranks in one thread, under a virtual clock: deterministic, replayable from a seed, and never really waiting.

`VirtualCluster` runs one collective per rank. Whenever several ranks could go on, the seed decides who does; when none can,
the clock jumps to the next arrival. A link passes `bytes_per_s` in each direction, one message at a time, and adds
`latency_s`; `jitter_s` adds a random part drawn from the seed (messages between two ranks still arrive in order).

When nothing can ever happen again the run ends with `DeadlockError`, which says who waits for whom. A rank that raises is
dead for the others: their receives raise `PeerError`, as they would over sockets.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from offbeat.errors import OffbeatError, PeerError, PeerTimeoutError
from offbeat.transport.driver import Driver, Finished, Pending, Ticket
from offbeat.transport.operations import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Now,
    Operation,
    Payload,
    Recv,
    Send,
    Sleep,
)

T = TypeVar("T")


class DeadlockError(OffbeatError):
    """Every rank waits for another one and no message is under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualLink:
    """What each rank's network connection can do.

    Attributes:
        latency_s: time from the last byte's departure to its arrival, >= 0.
        bytes_per_s: rate in each direction, > 0; infinite by default.
        jitter_s: upper bound of a random addition to each message's latency, >= 0.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    jitter_s: float = 0.0


class VirtualCluster:
    """`world_size` ranks that exchange messages under a virtual clock.

    Args:
        world_size: number of ranks, >= 1.
        seed: decides the order in which ranks go on and every jitter.
        link: the network.
    """

    def __init__(self, world_size: int, *, seed: int = 0, link: VirtualLink | None = None) -> None:
        self.world_size = world_size
        self.now_s = 0.0
        self.drivers = [VirtualDriver(self, rank) for rank in range(world_size)]
        self._link = link or VirtualLink()
        self._random = random.Random(seed)  # noqa: S311 - a replayable schedule, not a secret
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._out_free_s = [0.0] * world_size
        self._in_free_s = [0.0] * world_size
        self._inbox: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self._meetings: dict[int, dict[int, Operation]] = {}
        self._results: dict[int, dict[int, Any]] = {}
        self._dead: dict[int, str] = {}

    def run(
        self, collectives: Sequence[Collective[T]], *, channel: int = 0, wrap: Callable[[Driver], Driver] | None = None
    ) -> list[T]:
        """Carry out `collectives[rank]` on every rank and return their results. Raises the first error of the lowest rank.

        Args:
            collectives: one generator a rank.
            channel: the channel all of them use.
            wrap: puts a wrapper around each rank's driver.
        """
        outcomes = self.outcomes(collectives, channel=channel, wrap=wrap)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # no exception is left

    def outcomes(
        self, collectives: Sequence[Collective[T]], *, channel: int = 0, wrap: Callable[[Driver], Driver] | None = None
    ) -> list[T | OffbeatError]:
        """Like `run`, with a rank's `OffbeatError` in the place of its result."""
        drivers = [wrap(driver) if wrap else driver for driver in self.drivers]
        pending = [Pending(driver, work, channel) for driver, work in zip(drivers, collectives, strict=True)]
        errors: dict[int, OffbeatError] = {}
        unfinished = set(range(self.world_size))
        while unfinished:
            ready = [rank for rank in sorted(unfinished) if pending[rank].ready()]
            if not ready:
                self._next_event(unfinished)
                continue
            rank = self._random.choice(ready)
            try:
                pending[rank].advance()
            except OffbeatError as error:
                errors[rank] = error
                self._dead.setdefault(rank, str(error))
            if pending[rank].over:
                unfinished.discard(rank)
        return [errors[rank] if rank in errors else pending[rank].wait() for rank in range(self.world_size)]

    def _next_event(self, unfinished: set[int]) -> None:
        if not self._events:
            waits = ", ".join(f"rank {rank}: {self.drivers[rank].waiting_for}" for rank in sorted(unfinished))
            raise DeadlockError(f"nothing can happen any more at {self.now_s:.6f} s; {waits}")
        self.now_s, _, happen = heapq.heappop(self._events)
        happen()

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Let `happen` be called when the clock reaches `when_s`."""
        self._num_events += 1
        heapq.heappush(self._events, (when_s, self._num_events, happen))

    def deliver(self, source: int, target: int, channel: int, payload: Payload) -> None:
        """Put a message on the wire."""
        duration_s = len(payload) / self._link.bytes_per_s
        departs_s = max(self.now_s, self._out_free_s[source])
        self._out_free_s[source] = departs_s + duration_s
        latency_s = self._link.latency_s + self._random.random() * self._link.jitter_s
        arrives_s = max(departs_s + latency_s, self._in_free_s[target]) + duration_s
        self._in_free_s[target] = arrives_s
        inbox, message = self._inbox[source, target, channel], bytes(payload)
        self.at(arrives_s, lambda: inbox.append(message))

    def take(self, source: int, target: int, channel: int) -> deque[bytes]:
        """The messages that have arrived and wait for their receiver."""
        return self._inbox[source, target, channel]

    def death(self) -> tuple[int, str] | None:
        """The first rank that failed, and why."""
        return next(iter(self._dead.items()), None)

    def meet(self, rank: int, key: int, operation: Operation) -> None:
        """Rank `rank` enters the dense collective `key`; the last one to come computes the result for all."""
        here = self._meetings.setdefault(key, {})
        here[rank] = operation
        if len(here) == self.world_size:
            everyone = [here[r] for r in range(self.world_size)]
            num_bytes = max(_num_bytes(op) for op in everyone)
            del self._meetings[key]
            self.at(
                self.now_s + self._dense_s(num_bytes),
                lambda: self._results.__setitem__(key, dict(enumerate(_combine(everyone)))),
            )

    def has_met(self, key: int) -> bool:
        """Whether the dense collective is over."""
        return key in self._results

    def take_result(self, rank: int, key: int) -> Any:
        """Rank `rank`'s result of a dense collective that is over, once."""
        results = self._results[key]
        result = results.pop(rank)
        if not results:
            del self._results[key]
        return result

    def _dense_s(self, num_bytes: int) -> float:
        hops = 2 * (self.world_size - 1)
        return hops * (self._link.latency_s + num_bytes / self.world_size / self._link.bytes_per_s)


class VirtualDriver(Driver):
    """One rank of a `VirtualCluster`."""

    def __init__(self, cluster: VirtualCluster, rank: int) -> None:
        self.rank = rank
        self.world_size = cluster.world_size
        self.waiting_for = "nothing"
        self._cluster = cluster
        self._num_meetings = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        cluster = self._cluster
        self.waiting_for = type(operation).__name__
        match operation:
            case Send(peer, payload):
                cluster.deliver(self.rank, peer, channel, payload)
                return Finished()
            case Recv(peer, timeout_s):
                self.waiting_for = f"Recv from {peer}"
                return _VirtualReceive(cluster, peer, self.rank, channel, timeout_s)
            case Now():
                return Finished(cluster.now_s)
            case Sleep(seconds):
                return _VirtualSleep(cluster, seconds)
            case AllReduce() | Broadcast() | AllGather():
                # Dense collectives meet in the order in which each rank begins them, whatever their channel, as over gloo.
                key = self._num_meetings
                self._num_meetings += 1
                cluster.meet(self.rank, key, operation)
                return _VirtualMeeting(cluster, self.rank, key)

    def close(self) -> None:
        pass


class _VirtualReceive:
    def __init__(self, cluster: VirtualCluster, source: int, target: int, channel: int, timeout_s: float | None) -> None:
        self._cluster = cluster
        self._inbox = cluster.take(source, target, channel)
        self._source = source
        self._expired = False
        if timeout_s is not None:
            cluster.at(cluster.now_s + timeout_s, self._expire)

    def _expire(self) -> None:
        self._expired = True

    def done(self) -> bool:
        return bool(self._inbox) or self._expired or self._cluster.death() is not None

    def wait(self) -> bytes:
        if self._inbox:
            return self._inbox.popleft()
        if (death := self._cluster.death()) is not None:
            raise PeerError(f"rank {death[0]} failed while rank {self._source} was waited for: {death[1]}", rank=death[0])
        if self._expired:
            raise PeerTimeoutError(f"nothing came from rank {self._source} in time", rank=self._source)
        raise AssertionError("a virtual receive was waited for before it was done")


class _VirtualSleep:
    def __init__(self, cluster: VirtualCluster, seconds: float) -> None:
        self._over = False
        cluster.at(cluster.now_s + seconds, self._wake)

    def _wake(self) -> None:
        self._over = True

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        assert self._over, "a virtual sleep was waited for before it was done"


class _VirtualMeeting:
    def __init__(self, cluster: VirtualCluster, rank: int, key: int) -> None:
        self._cluster, self._rank, self._key = cluster, rank, key

    def done(self) -> bool:
        return self._cluster.has_met(self._key) or self._cluster.death() is not None

    def wait(self) -> Any:
        if self._cluster.has_met(self._key):
            return self._cluster.take_result(self._rank, self._key)
        death = self._cluster.death()
        assert death is not None, "a virtual collective was waited for before it was done"
        raise PeerError(f"rank {death[0]} failed during a collective: {death[1]}", rank=death[0])


def _num_bytes(operation: Operation) -> int:
    match operation:
        case AllReduce(tensor) | Broadcast(tensor, _):
            return tensor.nbytes
        case AllGather(payload):
            return len(payload)
        case _:
            raise AssertionError(f"{operation} is no dense collective")


def _combine(everyone: Sequence[Operation]) -> list[Any]:
    """The results of one dense collective, by rank. Sums in the order of ranks."""
    match everyone[0]:
        case AllReduce():
            tensors = [op.tensor for op in everyone if isinstance(op, AllReduce)]
            total = torch.stack(tensors).sum(dim=0)
            return [tensor.copy_(total) for tensor in tensors]
        case Broadcast(_, root):
            tensors = [op.tensor for op in everyone if isinstance(op, Broadcast)]
            return [tensor.copy_(tensors[root]) for tensor in tensors]
        case _:
            payloads = [bytes(op.payload) for op in everyone if isinstance(op, AllGather)]
            return [payloads] * len(payloads)
