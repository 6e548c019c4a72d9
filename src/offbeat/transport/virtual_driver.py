"""One rank of a virtual cluster: how it begins operations, and the tickets that it gets
for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.errors import PeerError, PeerTimeoutError
from offbeat.transport.driver import Driver, Finished, Ticket
from offbeat.transport.operations import (
    DenseOperation,
    Now,
    Operation,
    Payload,
    Post,
    Recv,
    RecvAny,
    Send,
    Sleep,
)

if TYPE_CHECKING:
    from offbeat.transport.virtual import VirtualCluster


@dataclass(frozen=True, slots=True)
class SleepUntil(Sleep):
    """Sleep until something has happened at this rank. Under a virtual clock alone.

    Attributes:
        over: whether it has; is asked whenever something happens at this rank.
    """

    seconds: float = math.inf
    over: Callable[[], bool] = bool


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
                return Finished()
            case Recv(peer, timeout_s):
                self.waiting_for = f"Recv from {peer}"
                return _VirtualReceive(cluster, peer, self.rank, channel, timeout_s)
            case RecvAny(peers, timeout_s):
                self.waiting_for = f"RecvAny from {sorted(peers)}"
                return _VirtualReceiveAny(cluster, peers, self.rank, channel, timeout_s)
            case Post(payload):
                cluster.post(self.rank, channel, payload)
                return Finished()
            case Now():
                return Finished(cluster.now_s)
            case SleepUntil(_, over):
                return _VirtualCondition(over)
            case Sleep(seconds):
                return _VirtualSleep(cluster, self.rank, seconds)
            case DenseOperation():
                # The n-th dense operation of one rank belongs to the n-th of every other rank,
                # whatever its channel, as over gloo.
                number = self._num_dense
                self._num_dense += 1
                cluster.begin_dense(self.rank, number, operation)
                return _VirtualDense(cluster, self.rank, number)

    def now_s(self, channel: int) -> float:
        return self._cluster.now_s

    def close(self) -> None:
        self._cluster.leave(self.rank)


class _VirtualTimeout:
    """A time limit of the virtual clock."""

    def __init__(self, cluster: VirtualCluster, rank: int, timeout_s: float | None) -> None:
        self.expired = False
        self._cluster, self._rank = cluster, rank
        if timeout_s is not None:
            cluster.at(cluster.now_s + timeout_s, self._expire)

    def _expire(self) -> None:
        self.expired = True
        self._cluster.touch(self._rank)


class _VirtualReceive:
    def __init__(
        self,
        cluster: VirtualCluster,
        source: int,
        target: int,
        channel: int,
        timeout_s: float | None,
    ) -> None:
        self._cluster = cluster
        self._source = source
        self._target = target
        self._channel = channel
        self._limit = _VirtualTimeout(cluster, target, timeout_s)

    def done(self) -> bool:
        return (
            self._is_here()
            or self._limit.expired
            or self._cluster.dead_among({self._source}) is not None
        )

    def wait(self) -> Payload:
        if self._is_here():
            return self._cluster.take(self._source, self._target, self._channel)
        if (death := self._cluster.dead_among({self._source})) is not None:
            raise PeerError(
                f"rank {death[0]} failed while rank {self._source} was waited for: {death[1]}",
                rank=death[0],
            )
        assert self._limit.expired, "a virtual receive was waited for before it was done"
        raise PeerTimeoutError(f"nothing came from rank {self._source} in time", rank=self._source)

    def _is_here(self) -> bool:
        return self._source in self._cluster.senders(self._target, self._channel)


class _VirtualReceiveAny:
    def __init__(
        self,
        cluster: VirtualCluster,
        peers: frozenset[int],
        target: int,
        channel: int,
        timeout_s: float | None,
    ) -> None:
        self._cluster = cluster
        self._peers = peers
        self._target = target
        self._channel = channel
        self._limit = _VirtualTimeout(cluster, target, timeout_s)

    def done(self) -> bool:
        return (
            bool(self._here())
            or self._limit.expired
            or self._cluster.departed_among(self._peers) is not None
        )

    def wait(self) -> tuple[int, Payload]:
        if here := self._here():
            sender = self._cluster.choose(here)
            return sender, self._cluster.take(sender, self._target, self._channel)
        if (departure := self._cluster.departed_among(self._peers)) is not None:
            rank, reason = departure
            raise PeerError(f"rank {rank} will send nothing more: {reason}", rank=rank)
        assert self._limit.expired, "a virtual receive was waited for before it was done"
        raise PeerTimeoutError("nothing came from anybody in time")

    def _here(self) -> Set[int]:
        return self._cluster.senders(self._target, self._channel) & self._peers


class _VirtualSleep:
    def __init__(self, cluster: VirtualCluster, rank: int, seconds: float) -> None:
        self._over = False
        self._cluster, self._rank = cluster, rank
        cluster.at(cluster.now_s + seconds, self._wake)

    def _wake(self) -> None:
        self._over = True
        self._cluster.touch(self._rank)

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        assert self._over, "a virtual sleep was waited for before it was done"


class _VirtualCondition:
    def __init__(self, over: Callable[[], bool]) -> None:
        self.done = over

    def wait(self) -> None:
        assert self.done(), "a virtual condition was waited for before it held"


class _VirtualDense:
    """A dense operation under way."""

    def __init__(self, cluster: VirtualCluster, rank: int, number: int) -> None:
        self._cluster, self._rank, self._number = cluster, rank, number
        self._everyone = range(cluster.world_size)

    def done(self) -> bool:
        return (
            self._cluster.has_dense_result(self._number)
            or self._cluster.dead_among(self._everyone) is not None
        )

    def wait(self) -> Any:
        if self._cluster.has_dense_result(self._number):
            return self._cluster.take_dense_result(self._rank, self._number)
        death = self._cluster.dead_among(self._everyone)
        assert death is not None, "a virtual collective was waited for before it was done"
        raise PeerError(f"rank {death[0]} failed during a collective: {death[1]}", rank=death[0])
