"""Bytes, messages and arrival times, counted around a driver and never by an algorithm."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import (
    AllGather,
    AllReduce,
    Broadcast,
    Operation,
    Recv,
    RecvAny,
    Send,
)
from offbeat.transport.wrappers.base import Wrapper

_MAX_ARRIVALS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one rank has moved; totals since the beginning.

    Attributes:
        bytes_sent: payload bytes; headers and encryption come on top.
        bytes_received: payload bytes.
        messages_sent: number of messages.
        messages_received: number of messages.
        wait_s: time in which this rank stood still for the others (inside a ticket's `wait`), in
            seconds.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    wait_s: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
            messages_sent=self.messages_sent + other.messages_sent,
            messages_received=self.messages_received + other.messages_received,
            wait_s=self.wait_s + other.wait_s,
        )


def ring_traffic(operation: Operation, result: Any, *, rank: int, world_size: int) -> Traffic:
    """What a dense collective moves for `rank` when it is carried out on a ring of P = `world_size`
    ranks.

    - all-reduce of n bytes: 2 (P - 1) messages and ceil(2 (P - 1) n / P) bytes, both sent and
      received.
    - broadcast of n bytes, passed on from rank to rank: each rank but the last sends n, each but
      the root receives n.
    - all-gather of n_0 .. n_P-1 bytes: each rank sends every payload but its successor's and
      receives every one but its own.

    A backend may use another algorithm; these are the bytes that any bandwidth-optimal one moves.

    Args:
        operation: the collective; others have no traffic of this kind.
        result: what it returned (an all-gather's payloads).
        rank: whose share is asked for.
        world_size: P.
    """
    hops = world_size - 1
    match operation:
        case AllReduce(tensor):
            num_bytes = -(-2 * hops * tensor.nbytes // world_size)
            return Traffic(
                bytes_sent=num_bytes,
                bytes_received=num_bytes,
                messages_sent=2 * hops,
                messages_received=2 * hops,
            )
        case Broadcast(tensor, root):
            place = (rank - root) % world_size
            sends, receives = int(place < hops), int(place > 0)
            return Traffic(
                bytes_sent=sends * tensor.nbytes,
                bytes_received=receives * tensor.nbytes,
                messages_sent=sends,
                messages_received=receives,
            )
        case AllGather():
            sizes = [memoryview(payload).nbytes for payload in result]
            return Traffic(
                bytes_sent=sum(sizes) - sizes[(rank + 1) % world_size],
                bytes_received=sum(sizes) - sizes[rank],
                messages_sent=hops,
                messages_received=hops,
            )
        case _:
            return Traffic()


class Arrival(NamedTuple):
    """When this rank came to an operation that needs others, and how long that took.

    Attributes:
        step: training step, as marked.
        channel: channel of the collective.
        operation: class name of the operation.
        arrived_at_s: when it was begun, on the driver's clock, in seconds.
        waited_s: from then until its result was taken, in seconds.
    """

    step: int
    channel: int
    operation: str
    arrived_at_s: float
    waited_s: float


class Counting(Wrapper):
    """Counts bytes and messages, and notes when this rank arrives at each receive and dense
    collective.

    Args:
        inner: the wrapped driver.
        in_background: a thread of its own uses it: nobody stands still while that one waits, so its
            waiting is not counted.

    Attributes:
        traffic: totals. Dense collectives count as `ring_traffic` says.
    """

    def __init__(self, inner: Driver, *, in_background: bool = False) -> None:
        super().__init__(inner)
        self.traffic = Traffic()
        self._in_background = in_background
        # bounded, for whoever never takes them: the oldest go first
        self._arrivals: deque[Arrival] = deque(maxlen=_MAX_ARRIVALS)
        self._ready_at_s: float | None = None

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(_, payload):
                ticket = self.inner.start(operation, channel)
                self._add(Traffic(bytes_sent=memoryview(payload).nbytes, messages_sent=1))
                return ticket
            case Recv() | RecvAny() | AllReduce() | Broadcast() | AllGather():
                return _Timed(self, operation, channel)
            case _:
                return self.inner.start(operation, channel)

    def restart(self) -> None:
        """Count from zero again."""
        self.traffic = Traffic()
        self._arrivals.clear()
        self._ready_at_s = None

    def stood_still(self, begin_s: float, end_s: float) -> None:
        """Count a wait for the others that was not one of this driver's own operations; on the
        driver's clock.
        """
        if self._ready_at_s is None:
            self._ready_at_s = begin_s
        self._add(Traffic(wait_s=end_s - begin_s))

    def take_arrivals(self) -> list[Arrival]:
        """The arrivals since the last call, oldest first; at most the latest 65,536."""
        taken = list(self._arrivals)
        self._arrivals.clear()
        return taken

    def take_ready_at_s(self) -> float | None:
        """When this rank first stood still for the others since the last call, on the driver's
        clock; None if it never did.
        """
        taken, self._ready_at_s = self._ready_at_s, None
        return taken

    def _add(self, traffic: Traffic) -> None:
        self.traffic = self.traffic.plus(traffic)

    def _complete(self, result: Any, operation: Operation, arrival: Arrival) -> None:
        if isinstance(operation, RecvAny):
            sender, payload = result
            if sender != self.rank:
                self._add(Traffic(bytes_received=memoryview(payload).nbytes, messages_received=1))
        elif isinstance(operation, Recv):
            self._add(Traffic(bytes_received=memoryview(result).nbytes, messages_received=1))
        else:
            self._add(ring_traffic(operation, result, rank=self.rank, world_size=self.world_size))
        if not self._in_background:
            self._arrivals.append(arrival)


class _Timed:
    """A ticket that reports how long its operation took."""

    def __init__(self, counting: Counting, operation: Operation, channel: int) -> None:
        self._counting = counting
        self._operation = operation
        self._channel = channel
        self._step = counting.step
        self._arrived_at_s = counting.now_s(channel)
        self._ticket = counting.inner.start(operation, channel)

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> Any:
        counting, channel = self._counting, self._channel
        entered_s = counting.now_s(channel)
        try:
            result = self._ticket.wait()
        finally:
            left_s = counting.now_s(channel)
            if not counting._in_background:
                counting.stood_still(entered_s, left_s)
        name = type(self._operation).__name__
        arrival = Arrival(
            self._step, channel, name, self._arrived_at_s, left_s - self._arrived_at_s
        )
        counting._complete(result, self._operation, arrival)
        return result
