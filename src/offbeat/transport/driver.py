"""What carries collectives out: a `Driver` performs single operations, and `Pending` walks a
generator through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from offbeat.errors import OffbeatError
from offbeat.transport.operations import Collective, Now, Operation

T = TypeVar("T")


class Ticket(Protocol):
    """One operation under way."""

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once. Never blocks; may be pessimistic where a
        backend cannot tell.
        """
        ...

    def wait(self) -> Any:
        """Block until the operation is over and return its result, or raise what went wrong (an
        `OffbeatError`).
        """
        ...


class Finished:
    """The ticket of an operation that was over as soon as it began."""

    __slots__ = ("_result",)

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


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
        return float(self.start(Now(), channel).wait())

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


class Pending(Generic[T]):
    """A collective under way on one rank."""

    def __init__(self, driver: Driver, collective: Collective[T], channel: int) -> None:
        self._driver = driver
        self._collective = collective
        self._channel = channel
        self._ticket: Ticket = Finished()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._over = False

    def ready(self) -> bool:
        """Whether the next `advance` would go on without waiting."""
        return self._over or self._ticket.done()

    @property
    def over(self) -> bool:
        """Whether the collective has returned or raised."""
        return self._over

    def poll(self) -> bool:
        """Go on for as long as nothing has to be waited for. Returns whether the collective is
        over.
        """
        while not self._over and self._ticket.done():
            self.advance()
        return self._over

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
        self._over = True
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
            self._ticket = self._driver.start(operation, self._channel)
        except StopIteration as stop:
            self._end(result=stop.value)
        except BaseException as error:
            self._end(error=error)
            raise

    def _end(self, *, result: T | None = None, error: BaseException | None = None) -> None:
        self._over = True
        self._result, self._error = result, error
        self._ticket = Finished()  # a backend's handle may keep its connections open


class Stream:
    """The channels of one part's successive collectives. All ranks that call `next` equally often
    agree on them.
    """

    def __init__(self, number: int) -> None:
        # The upper bits are the stream and the lower ones count its collectives: channels of two
        # streams never coincide, in whatever order the streams are used.
        self._next = number << 32

    def next(self) -> int:
        """The channel of the next collective."""
        channel = self._next
        self._next += 1
        return channel
