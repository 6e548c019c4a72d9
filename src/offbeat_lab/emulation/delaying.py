"""What a worker emulates by itself: steps of another length, and a slow network in user space, for
machines where the kernel's own traffic shaping is not to be had.

Each rank has one outgoing link that carries one message at a time:

    begins = max(now, end of the previous one);  due = end = begins + delay(message)

A sender goes on at once: the message travels with the time it is due, and the receiver's ticket
waits until then. So all ranks need the same clock (one host, or the virtual driver) and must be
wrapped alike. Receiving links are never busy: many ranks that send to one are not slowed down by
each other, as they would be on a real network.
"""

from __future__ import annotations

import heapq
import math
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat.errors import OffbeatError, PeerTimeoutError, WireError
from offbeat.transport.driver import Driver, Finished, Ticket, Wrapper
from offbeat.transport.operations import (
    DenseOperation,
    Operation,
    Payload,
    Recv,
    RecvAny,
    Send,
    Sleep,
)
from offbeat_lab.cluster import Cluster

_DUE = struct.Struct("<d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """What occupies a link.

    Attributes:
        num_bytes: payload bytes.
        num_messages: 1, or a dense collective's number of rounds.
    """

    num_bytes: int
    num_messages: int = 1


class Delaying(Wrapper):
    """Delivers messages late; dense collectives take as long as a ring of such links would need.

    Args:
        inner: any driver, wrapped alike on every rank.
        delay: how long a delivery occupies the sender's link, in seconds; for a link of `latency_s`
            and `bytes_per_s` `d.num_messages * latency_s + d.num_bytes / bytes_per_s`.
    """

    def __init__(self, inner: Driver, delay: Callable[[Delivery], float]) -> None:
        super().__init__(inner)
        self._delay = delay
        self._link_free_s = -math.inf
        self._arrived: defaultdict[tuple[int, int], deque[tuple[float, Payload]]] = defaultdict(
            deque
        )
        self._arrived_from_any: defaultdict[int, list[tuple[float, int, int, Payload]]] = (
            defaultdict(list)
        )
        self._num_arrived = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(peer, payload):
                delivery = Delivery(num_bytes=memoryview(payload).nbytes)
                due_s = self._occupy_link(delivery, channel)
                return self.inner.start(Send(peer, _DUE.pack(due_s) + payload), channel)
            case Recv(peer, _):
                return _LateMessage(self, operation, channel, self._arrived[peer, channel])
            case RecvAny():
                return _LateMessageOfAny(self, operation, channel)
            case DenseOperation():
                ticket = self.inner.start(operation, channel)
                return _LateResult(
                    self, ticket, channel, self._occupy_link(self._share(operation), channel)
                )
            case _:
                return self.inner.start(operation, channel)

    def sleep_until(self, when_s: float, channel: int) -> Ticket:
        """A ticket that is done when the inner driver's clock shows `when_s`."""
        remaining_s = when_s - self.now_s(channel)
        return self.inner.start(Sleep(remaining_s), channel) if remaining_s > 0 else Finished()

    def unstamp(self, sender: int, payload: Payload) -> tuple[float, Payload]:
        """When a message is due, on the inner driver's clock, and what it says."""
        stamped = memoryview(payload)
        if len(stamped) < _DUE.size:
            raise WireError(
                f"a message of rank {sender} carries no time at which it is due; delay the driver"
                " of every rank"
            )
        (due_s,) = _DUE.unpack_from(stamped)
        return due_s, stamped[_DUE.size :]

    def from_any(self, channel: int) -> list[tuple[float, int, int, Payload]]:
        """What arrived on `channel` for a `RecvAny`: a heap of (due, number, sender, payload)."""
        return self._arrived_from_any[channel]

    def take_in(self, sender: int, channel: int, payload: Payload) -> None:
        """Let a message wait for a `RecvAny` until it is due; at once if this rank posted it to
        itself.
        """
        due_s, content = (
            (-math.inf, payload) if sender == self.rank else self.unstamp(sender, payload)
        )
        self._num_arrived += 1
        heapq.heappush(self._arrived_from_any[channel], (due_s, self._num_arrived, sender, content))

    def _occupy_link(self, delivery: Delivery, channel: int) -> float:
        """Returns when the delivery ends."""
        self._link_free_s = max(self.now_s(channel), self._link_free_s) + self._delay(delivery)
        return self._link_free_s

    def _share(self, operation: DenseOperation) -> Delivery:
        traffic = operation.traffic(None, rank=self.rank, world_size=self.world_size)
        return Delivery(num_bytes=traffic.bytes_sent, num_messages=traffic.messages_sent)


class _LateResult:
    """A dense collective that is over, but not before it is due."""

    def __init__(self, delaying: Delaying, ticket: Ticket, channel: int, due_s: float) -> None:
        self._ticket = ticket
        # begun here and not when the result is in, so that the two pass at the same time
        self._rest = delaying.sleep_until(due_s, channel)

    def done(self) -> bool:
        return self._ticket.done() and self._rest.done()

    def wait(self) -> Any:
        result = self._ticket.wait()
        self._rest.wait()
        return result


class _LateMessage:
    """A receive that gives its message away when it is due. One that times out leaves it to the
    next receive.
    """

    def __init__(
        self,
        delaying: Delaying,
        operation: Recv,
        channel: int,
        arrived: deque[tuple[float, Payload]],
    ) -> None:
        self._delaying = delaying
        self._peer = operation.peer
        self._channel = channel
        self._arrived = arrived
        timeout_s = math.inf if operation.timeout_s is None else operation.timeout_s
        self._deadline_s = delaying.now_s(channel) + timeout_s
        self._ticket: Ticket = Finished() if arrived else delaying.inner.start(operation, channel)
        self._rest: Ticket | None = None

    def done(self) -> bool:
        # once taken in, the message no longer makes its own ticket done
        return (self._rest is not None or self._ticket.done()) and self._until_due().done()

    def wait(self) -> Payload:
        self._until_due().wait()
        due_s, payload = self._arrived[0]
        if due_s > self._deadline_s:
            raise PeerTimeoutError(
                f"the time limit passed before a message of rank {self._peer} was due",
                rank=self._peer,
            )
        self._arrived.popleft()
        return payload

    def _until_due(self) -> Ticket:
        """What is left to wait for once the message is here."""
        if self._rest is None:
            try:
                if not self._arrived:
                    self._arrived.append(self._delaying.unstamp(self._peer, self._ticket.wait()))
            except OffbeatError as error:
                self._rest = Finished(error=error)
            else:
                self._rest = self._delaying.sleep_until(
                    min(self._arrived[0][0], self._deadline_s), self._channel
                )
        return self._rest


class _LateMessageOfAny:
    """A receive from anybody that gives messages away in the order in which they are due."""

    def __init__(self, delaying: Delaying, operation: RecvAny, channel: int) -> None:
        self._delaying = delaying
        self._peers = operation.peers
        self._channel = channel
        self._arrived = delaying.from_any(channel)
        timeout_s = math.inf if operation.timeout_s is None else operation.timeout_s
        self._deadline_s = delaying.now_s(channel) + timeout_s
        self._ticket = delaying.inner.start(RecvAny(self._peers), channel)
        self._error: OffbeatError | None = None
        self._alarm_s = math.inf
        self._alarm: Ticket = Finished()

    def done(self) -> bool:
        while self._error is None and self._ticket.done():
            self._take_in(self._ticket)
            self._ticket = self._delaying.inner.start(RecvAny(self._peers), self._channel)
        return self._error_is_next() or self._is_past(self._next_s())

    def wait(self) -> tuple[int, Payload]:
        while not self.done():
            remaining_s = self._next_s() - self._delaying.now_s(self._channel)
            timeout_s = max(0.0, remaining_s) if remaining_s < math.inf else None
            self._take_in(
                self._delaying.inner.start(RecvAny(self._peers, timeout_s), self._channel)
            )
        if self._error is not None and self._error_is_next():
            raise self._error
        if not self._arrived or self._arrived[0][0] > self._deadline_s:
            raise PeerTimeoutError("the time limit passed before anybody's message was due")
        _, _, sender, payload = heapq.heappop(self._arrived)
        return sender, payload

    def _take_in(self, ticket: Ticket) -> None:
        try:
            sender, payload = ticket.wait()
            self._delaying.take_in(sender, self._channel, payload)
        except PeerTimeoutError:
            pass
        except OffbeatError as error:
            self._error = error

    def _error_is_next(self) -> bool:
        """Whether all that was sent before the failure has been given away."""
        return self._error is not None and not self._arrived

    def _next_s(self) -> float:
        """When there will be something to give away, or the time limit passes."""
        return min(self._arrived[0][0] if self._arrived else math.inf, self._deadline_s)

    def _is_past(self, when_s: float) -> bool:
        # an alarm that rang settles it: the clock may show a rounded time just before `when_s`
        if when_s < self._alarm_s:
            self._alarm_s, self._alarm = when_s, self._delaying.sleep_until(when_s, self._channel)
        return when_s < math.inf and self._alarm.done()


class StepTimeEmulator:
    """Makes one worker's steps as long as the cluster says, by sleeping: workers that are late,
    workers that are slow, and steps as long as an accelerator's.

        sleep the straggling delay of this step
        forward
        sleep until forward and the coming backward together take what the cluster says
        backward

    The pad comes before the backward pass, so that what a strategy overlaps with the backward pass
    still overlaps with it. How long the coming one will take is not known; it is taken to need as
    much CPU time for each sample as the one before, less what the strategy itself computed in it,
    which an emulated accelerator would not do for it.

    Args:
        cluster: None changes nothing.
        rank: of this worker.
        by_sleeping: whether a lower speed is to be imitated here, since no CPU quota does it.
    """

    def __init__(self, cluster: Cluster | None, rank: int, *, by_sleeping: bool) -> None:
        self._cluster = cluster
        self._rank = rank
        self._by_sleeping = by_sleeping
        self._backward_cpu_s = self._backward_s = 0.0
        self._computed_s = 0.0
        self._is_late = False
        self._size = 1.0
        self.slept_s = 0.0
        """Seconds slept in the current step."""
        self.num_late = 0
        """Steps whose own computing already took longer than it was to take altogether."""

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins. Sleep first, if this worker is to be late in it."""
        self.slept_s = 0.0
        self._is_late = False
        if self._cluster is not None:
            self._sleep(self._cluster.delay_s(self._rank, step))
        self._computed_s = time.monotonic()

    def before_backward(self, elapsed_s: float, *, size: float = 1.0) -> None:
        """The forward pass is done.

        Args:
            elapsed_s: training time so far, which decides about speeds that change.
            size: of this batch in usual ones; an accelerator takes so many times as long for it.
        """
        cluster = self._cluster
        if cluster is None:
            return
        speed = cluster.speed_at(self._rank, elapsed_s)
        # A step may have several passes, and those before this one have been slept for.
        forward_s = time.monotonic() - self._computed_s
        backward_s = self._backward_cpu_s * size / self._size
        self._size = size
        if cluster.step_s is not None:
            left_s = cluster.step_s * size / speed - forward_s - backward_s
            self.num_late += left_s < 0 and not self._is_late
            self._is_late |= left_s < 0
            self._sleep(left_s)
        elif self._by_sleeping:
            self._sleep((forward_s + backward_s) * (1 / speed - 1))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward pass, to learn how long the next one will take."""
        if self._cluster is None:
            yield
            return
        before_s, before_cpu_s = time.monotonic(), time.thread_time()
        yield
        self._backward_s = time.monotonic() - before_s
        self._backward_cpu_s = time.thread_time() - before_cpu_s
        self._computed_s = time.monotonic()

    def exclude_overhead(self, encode_s: float, wait_s: float) -> None:
        """Of the last backward pass, the strategy's own work took `encode_s`, and `wait_s` were
        spent waiting.

        Both by the clock: where more workers than cores compute, that is more than the CPU time
        that encoding took.
        """
        busy_s = self._backward_s - wait_s
        if busy_s > 0:
            self._backward_cpu_s *= max(0.0, 1 - encode_s / busy_s)

    def _sleep(self, duration_s: float) -> None:
        if duration_s > 0:
            begun_s = time.monotonic()
            time.sleep(duration_s)
            self.slept_s += time.monotonic() - begun_s
