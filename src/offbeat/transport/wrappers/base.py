"""What every wrapper does with what it does not care about."""

from __future__ import annotations

from typing import NoReturn

from offbeat.errors import OffbeatError
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import Operation


class Wrapper(Driver):
    """Passes everything on to `inner`.

    Attributes:
        inner: the wrapped driver.
        step: the training step that was marked last.
        now_s: the inner driver's clock, for a channel, in seconds.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.now_s = inner.clock()
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

    def departed(self) -> frozenset[int]:
        return self.inner.departed()

    def close(self) -> None:
        self.inner.close()


class Raised:
    """The ticket of an operation that has failed."""

    def __init__(self, error: OffbeatError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> NoReturn:
        raise self._error
