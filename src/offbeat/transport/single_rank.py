"""The driver of a world of one: every collective already has its result."""

from __future__ import annotations

import math
import time
from queue import Empty, SimpleQueue

from offbeat.errors import PeerTimeoutError, UnsupportedError
from offbeat.transport.driver import DONE, Driver, Finished, Ticket
from offbeat.transport.operations import (
    DenseOperation,
    Now,
    Operation,
    Payload,
    Post,
    RecvAny,
    Sleep,
)


class SingleRank(Driver):
    """World size 1."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._posted: dict[int, SimpleQueue[Payload]] = {}

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                return Finished(operation.combine([operation])[0])
            case Now():
                return Finished(time.monotonic())
            case Sleep(seconds):
                time.sleep(seconds)
                return DONE
            case Post(payload):
                self._queue(channel).put(payload)
                return DONE
            case RecvAny(_, timeout_s):
                return _Posted(self._queue(channel), timeout_s)
            case _:
                raise UnsupportedError(
                    f"a world of one rank has no peer to {type(operation).__name__.lower()} to or"
                    " from"
                )

    def close(self) -> None:
        pass

    def _queue(self, channel: int) -> SimpleQueue[Payload]:
        return self._posted.setdefault(channel, SimpleQueue())


class _Posted:
    """A receive of what this rank leaves for itself."""

    def __init__(self, queue: SimpleQueue[Payload], timeout_s: float | None) -> None:
        self._queue = queue
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def done(self) -> bool:
        return not self._queue.empty() or time.monotonic() >= self._deadline_s

    def wait(self) -> tuple[int, Payload]:
        remaining_s = (
            None if self._deadline_s == math.inf else max(0.0, self._deadline_s - time.monotonic())
        )
        try:
            return SingleRank.rank, self._queue.get(timeout=remaining_s)
        except Empty:
            raise PeerTimeoutError(
                "the time limit passed while this rank waited for what it posts to itself"
            ) from None
