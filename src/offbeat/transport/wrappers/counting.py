"""Bytes, messages and arrival times, counted around a driver and never by an algorithm."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import override

from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import (
    DenseOperation,
    Operation,
    Recv,
    RecvAny,
    Send,
    Traffic,
    kind_of,
)
from offbeat.transport.wrappers.base import Wrapper

_MAX_ARRIVALS = 65_536

_Awaited: TypeAlias = Recv | RecvAny | DenseOperation
"""Operations whose result depends on peers."""


class Arrival(NamedTuple):
    """When this rank came to an operation that needs its peers, and how long that took.

    Attributes:
        step: training step, as marked.
        channel: channel of the collective.
        operation: what `kind_of` says of the operation.
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
        in_background: a thread of its own uses it: training does not wait while that thread does,
            so its waiting is not counted.

    Attributes:
        traffic: totals. Dense operations count as their `traffic` says.
        clock: of the wrapped driver, in seconds, on a channel.
    """

    def __init__(self, inner: Driver, *, in_background: bool = False) -> None:
        super().__init__(inner)
        self.traffic = Traffic()
        # Bound once, because each operation reads it three times.
        self.clock = inner.now_s
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
            case Recv() | RecvAny() | DenseOperation():
                return (_Counted if self._in_background else _Timed)(self, operation, channel)
            case _:
                return self.inner.start(operation, channel)

    def restart(self) -> None:
        """Count from zero again."""
        self.traffic = Traffic()
        self._arrivals.clear()
        self._ready_at_s = None

    def record_wait(self, begin_s: float, end_s: float) -> None:
        """Count a wait for peers that was not one of this driver's own operations; times are those
        of the driver's clock.
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
        """When this rank first waited for its peers since the last call, on the driver's clock;
        None if it never did.
        """
        taken, self._ready_at_s = self._ready_at_s, None
        return taken

    def _add(self, traffic: Traffic) -> None:
        self.traffic = self.traffic.plus(traffic)

    def _add_result(self, result: Any, operation: _Awaited) -> None:
        match operation:
            case DenseOperation():
                self._add(operation.traffic(result, rank=self.rank, world_size=self.world_size))
            case Recv():
                self._add(Traffic(bytes_received=memoryview(result).nbytes, messages_received=1))
            case RecvAny():
                sender, payload = result
                if sender != self.rank:  # what a rank posts to itself is no traffic
                    num_bytes = memoryview(payload).nbytes
                    self._add(Traffic(bytes_received=num_bytes, messages_received=1))


class _Counted:
    """A ticket that reports what its operation has moved."""

    def __init__(self, counting: Counting, operation: _Awaited, channel: int) -> None:
        self._counting = counting
        self._operation = operation
        self._ticket = counting.inner.start(operation, channel)

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> Any:
        result = self._ticket.wait()
        self._counting._add_result(result, self._operation)
        return result


class _Timed(_Counted):
    """A ticket that also reports how long its operation took."""

    def __init__(self, counting: Counting, operation: _Awaited, channel: int) -> None:
        self._channel = channel
        self._step = counting.step
        self._arrived_at_s = counting.clock(channel)
        super().__init__(counting, operation, channel)

    @override
    def wait(self) -> Any:
        counting, channel = self._counting, self._channel
        entered_s = counting.clock(channel)
        try:
            result = super().wait()
        finally:
            left_s = counting.clock(channel)
            counting.record_wait(entered_s, left_s)
        waited_s = left_s - self._arrived_at_s
        kind = kind_of(self._operation)
        counting._arrivals.append(Arrival(self._step, channel, kind, self._arrived_at_s, waited_s))
        return result
