"""What carries collectives out: a `Driver` performs single operations, `Pending` walks a generator
through them, and `Counting`, around a driver, counts what passes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from operator import add
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from offbeat.errors import OffbeatError, PeerError
from offbeat.transport.operations import (
    Collective,
    DenseOperation,
    Operation,
    Recv,
    RecvAny,
    Send,
    Traffic,
)
from offbeat.transport.threads import let_others_first, transport_threads

T = TypeVar("T")

_MAX_ARRIVALS = 65_536

_Awaited: TypeAlias = Recv | RecvAny | DenseOperation
"""Operations whose result depends on peers."""


class Ticket(Protocol):
    """One operation under way."""

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once. Never blocks; may be pessimistic where a
        backend cannot tell.
        """

    def wait(self) -> Any:
        """Block until the operation is over and return its result, or raise what went wrong (an
        `OffbeatError`).
        """


class Finished:
    """The ticket of an operation that was over as soon as it began, or could not begin."""

    __slots__ = ("_error", "_result")

    def __init__(self, result: Any = None, *, error: OffbeatError | None = None) -> None:
        self._result, self._error = result, error

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Underway:
    """The ticket of an operation of which two functions tell what a `Ticket` has to."""

    __slots__ = ("done", "wait")

    def __init__(self, done: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.done, self.wait = done, wait


DONE: Final = Finished()
"""The ticket of one that has no result."""


class Driver(ABC):
    """Performs operations for one rank.

    `start` begins an operation and returns without waiting for any other rank. Drivers and wrappers
    implement `start`, `mark_step` and `close`; nobody overrides `launch` or `run`. A driver may be
    used from any thread, by one at a time.
    """

    rank: int
    world_size: int

    @abstractmethod
    def start(self, operation: Operation, channel: int) -> Ticket:
        """Begin `operation` on `channel` (0 <= channel < 2**63). Raises `UnsupportedError` for one
        it cannot perform.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back threads, sockets and groups. Idempotent."""

    def now_s(self, channel: int) -> float:
        """This driver's clock, in seconds; what a `Now` on `channel` gives."""
        return time.monotonic()

    def mark_step(self, step: int) -> None:  # noqa: B027 - most drivers do not care which step it is
        """Tell wrappers that script or count by step which training step begins."""

    def abort(self, reason: str, *, blame: int | None = None) -> None:  # noqa: B027 - without a side channel nobody can be told
        """Tell all peers that this rank gives up, so that none of them waits for it. `blame`: the
        rank whose failure is the cause.
        """

    def end_training(self, channel: int) -> None:  # noqa: B027 - without connections nobody waits
        """Tell all peers that this rank sends nothing more but on `channel`, and give up what dense
        collectives need. A peer that waits for anything else from this rank raises `PeerError`.
        """

    def name_of(self, rank: int) -> int:
        """What one of this driver's ranks is called outside of it."""
        return rank

    def departed(self) -> frozenset[int]:
        """The ranks that are known to send nothing more: dead, or closed. Never blocks."""
        return frozenset()

    def launch(self, collective: Collective[T], channel: int) -> Pending[T]:
        """Begin `collective` and carry it out as far as that is possible without waiting."""
        pending = Pending(self, collective, channel)
        pending.poll()
        return pending

    def run(self, collective: Collective[T], channel: int) -> T:
        """Carry `collective` out and return its result."""
        return Pending(self, collective, channel).wait()

    def complete(self, pending: Pending[Any]) -> None:
        """Go on with `pending`, which is of this driver, until it is over."""
        while not pending.over:
            pending.advance()

    def condition(self) -> threading.Condition:
        """What threads of this rank wait on that share something; its lock may be taken again."""
        return threading.Condition()

    def beside(
        self, job: Callable[[], None], *, name: str, levels: int = 0
    ) -> Callable[[], object]:
        """Run `job`, which may wait for peers, beside the caller: in a thread called `name`. It and
        those that send and receive come after all others by so many `levels` of priority. Returns
        what waits for its end.
        """

        def run() -> None:
            if levels:
                let_others_first({threading.get_native_id(), *transport_threads()}, levels)
            job()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread.join


class Pending(Generic[T]):
    """A collective under way on one rank.

    Attributes:
        over: whether it has returned or raised.
    """

    def __init__(self, driver: Driver, collective: Collective[T], channel: int) -> None:
        self._driver = driver
        self._collective = collective
        self._channel = channel
        self._ticket: Ticket = DONE
        self._result: T | None = None
        self._error: BaseException | None = None
        self.over = False

    def ready(self) -> bool:
        """Whether the next `advance` would go on without waiting."""
        return self.over or self._ticket.done()

    def poll(self) -> bool:
        """Go on for as long as nothing has to be waited for. Returns whether the collective is
        over.
        """
        while not self.over and self._ticket.done():
            self.advance()
        return self.over

    def wait(self) -> T:
        """Go on until the collective is over; returns its result or raises its error. May be called
        again.
        """
        self._driver.complete(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever the generator returned

    def cancel(self) -> None:
        """Abandon the collective. Messages already sent stay sent."""
        self.over = True
        self._collective.close()

    def advance(self) -> None:
        """Wait for the current operation, give its outcome to the generator, and begin the next
        operation.
        """
        try:
            try:
                outcome = self._ticket.wait()
            except OffbeatError as error:
                # The protocol may survive the failure of a peer; what it does not catch ends it.
                operation = self._collective.throw(error)
            else:
                operation = self._collective.send(outcome)
            try:
                self._ticket = self._driver.start(operation, self._channel)
            except PeerError as error:
                # The protocol may have to find out what its peers did before it was cut off.
                self._ticket = Finished(error=error)
        except StopIteration as stop:
            self._end(result=stop.value)
        except BaseException as error:
            self._end(error=error)
            raise

    def _end(self, *, result: T | None = None, error: BaseException | None = None) -> None:
        self.over = True
        self._result, self._error = result, error
        self._ticket = DONE  # a backend's handle may keep its connections open


class Stream:
    """The channels of one callback's successive collectives. All ranks that call `next` equally
    often agree on them.
    """

    def __init__(self, number: int) -> None:
        # The upper bits are the stream and the lower ones count its collectives: channels of two
        # streams never coincide, in whatever order the streams are used.
        self._next = number << 32
        self._beside = dict[int, Stream]()

    def beside(self, place: int) -> Stream:
        """The stream of the `place`-th of collectives that are under way at once; this one for the
        first. On one stream a message of a later collective says that its sender is done with the
        earlier ones.
        """
        if place and place not in self._beside:
            self._beside[place] = Stream((self._next >> 32) + (place << 20))
        return self._beside[place] if place else self

    def next(self) -> int:
        """The channel of the next collective."""
        channel = self._next
        self._next += 1
        return channel


class Wrapper(Driver):
    """A driver around the driver `inner`, to which everything is passed on that a subclass does not
    handle itself. Wrappers nest in any order.

    Attributes:
        inner: the wrapped driver.
        step: the training step that was marked last.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.step = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        return self.inner.start(operation, channel)

    def mark_step(self, step: int) -> None:
        self.step = step
        self.inner.mark_step(step)

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        self.inner.abort(reason, blame=blame)

    def end_training(self, channel: int) -> None:
        self.inner.end_training(channel)

    def name_of(self, rank: int) -> int:
        return self.inner.name_of(rank)

    def departed(self) -> frozenset[int]:
        return self.inner.departed()

    def close(self) -> None:
        self.inner.close()

    def now_s(self, channel: int) -> float:
        return self.inner.now_s(channel)

    def condition(self) -> threading.Condition:
        return self.inner.condition()

    def complete(self, pending: Pending[Any]) -> None:
        self.inner.complete(pending)

    def beside(
        self, job: Callable[[], None], *, name: str, levels: int = 0
    ) -> Callable[[], object]:
        return self.inner.beside(job, name=name, levels=levels)


def total_of(one: Traffic, other: Traffic) -> Traffic:
    """What both have moved together."""
    return Traffic(*map(add, one, other))


class Arrival(NamedTuple):
    """When this rank came to an operation that needs its peers, and how long that took.

    Attributes:
        step: training step, as marked.
        channel: channel of the collective.
        operation: the kind of the operation.
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
        in_background: as given.
    """

    def __init__(self, inner: Driver, *, in_background: bool = False) -> None:
        super().__init__(inner)
        self.traffic = Traffic()
        # Bound once, because each operation reads it three times.
        self.clock = inner.now_s
        self.in_background = in_background
        # The number is bounded, because nobody may ever take them. The oldest go first.
        self._arrivals: deque[Arrival] = deque(maxlen=_MAX_ARRIVALS)
        self._ready_at_s: float | None = None

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(_, payload):
                ticket = self.inner.start(operation, channel)
                self._add(Traffic(bytes_sent=memoryview(payload).nbytes, messages_sent=1))
                return ticket
            case Recv() | RecvAny() | DenseOperation():
                return _Counted(self, operation, channel)
            case _:
                return self.inner.start(operation, channel)

    def waited_s(self) -> float:
        """Of its `traffic`, alone."""
        return self.traffic.wait_s

    def restart(self) -> None:
        """Count from zero again."""
        self.traffic, self._ready_at_s = Traffic(), None
        self._arrivals.clear()

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
        self.traffic = total_of(self.traffic, traffic)

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
    """A ticket that reports what its operation has moved, and, where training waits for it, how
    long it took.
    """

    def __init__(self, counting: Counting, operation: _Awaited, channel: int) -> None:
        self._counting, self._operation, self._channel = counting, operation, channel
        self._step, self._arrived_at_s = counting.step, counting.clock(channel)
        self._ticket = counting.inner.start(operation, channel)

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> Any:
        counting, channel = self._counting, self._channel
        entered_s = counting.clock(channel)
        try:
            result = self._ticket.wait()
        finally:
            left_s = counting.clock(channel)
            if not counting.in_background:
                counting.record_wait(entered_s, left_s)
        counting._add_result(result, self._operation)
        if not counting.in_background:
            waited_s, kind = left_s - self._arrived_at_s, self._operation.kind
            came = Arrival(self._step, channel, kind, self._arrived_at_s, waited_s)
            counting._arrivals.append(came)
        return result


class SessionTraffic:
    """Counts the traffic of a session: of its driver, and of those that callbacks use in threads of
    their own.

    Args:
        driver: the trainer's.
        wrap: put around each background driver before it is counted.

    Attributes:
        counting: the trainer's driver, counted.
    """

    def __init__(self, driver: Driver, *, wrap: Callable[[Driver], Driver]) -> None:
        self.counting = Counting(driver)
        self._wrap = wrap
        self._background: Counting | None = None
        self._of_earlier_drivers = Traffic()

    def count_in_background(self, driver: Driver) -> Driver:
        """`driver`, counted with the session's traffic. Each generation of members has a driver of
        its own; of those before this one only the counts are kept.
        """
        self._of_earlier_drivers = self._of_background()
        self._background = Counting(self._wrap(driver), in_background=True)
        return self._background

    def restart(self) -> None:
        """Count from 0: what setting up took, such as measuring the links, is not training."""
        self.counting.restart()
        if self._background is not None:
            self._background.restart()

    def total(self) -> Traffic:
        """Everything since `restart`."""
        return total_of(self.counting.traffic, self._of_background())

    def _of_background(self) -> Traffic:
        before, now = self._of_earlier_drivers, self._background
        return before if now is None else total_of(before, now.traffic)
