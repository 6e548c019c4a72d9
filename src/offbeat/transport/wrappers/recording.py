"""The sequence of operations that passed, for golden schedules."""

from __future__ import annotations

from typing import Any, NamedTuple

from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import (
    DenseOperation,
    Now,
    Operation,
    Post,
    Recv,
    RecvAny,
    Send,
    Sleep,
    kind_of,
)
from offbeat.transport.wrappers.base import Wrapper


class Recorded(NamedTuple):
    """One operation.

    Attributes:
        kind: what `kind_of` says of the operation.
        peer: the other rank of a message, the root of a broadcast, else None.
        num_bytes: bytes of the payload or tensor; 0 for a sleep.
        channel: channel of the collective.
    """

    kind: str
    peer: int | None
    num_bytes: int
    channel: int


class RecordingDriver(Wrapper):
    """Keeps every operation but `Now`: receives when their message is taken, the others when they
    begin.

    Attributes:
        operations: what has passed, in that order. Grows without bound.
    """

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.operations: list[Recorded] = []

    def start(self, operation: Operation, channel: int) -> Ticket:
        ticket = self.inner.start(operation, channel)
        kind = kind_of(operation)
        match operation:
            case Recv(peer, _):
                return _Taken(ticket, self.operations, peer, channel)
            case RecvAny():
                return _Taken(ticket, self.operations, None, channel)
            case Send(peer, payload):
                self.operations.append(Recorded(kind, peer, memoryview(payload).nbytes, channel))
            case DenseOperation():
                self.operations.append(
                    Recorded(kind, operation.root_rank, operation.num_bytes, channel)
                )
            case Sleep():
                self.operations.append(Recorded(kind, None, 0, channel))
            case Post(payload):
                self.operations.append(
                    Recorded(kind, self.rank, memoryview(payload).nbytes, channel)
                )
            case Now():
                pass
        return ticket


class _Taken:
    """A receive that is written down once its message is taken: its size is not known before, nor
    perhaps its sender.
    """

    def __init__(
        self, ticket: Ticket, operations: list[Recorded], peer: int | None, channel: int
    ) -> None:
        self._ticket = ticket
        self._operations = operations
        self._peer = peer
        self._channel = channel

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> Any:
        result = self._ticket.wait()
        kind = Recv if self._peer is not None else RecvAny
        sender, payload = (self._peer, result) if self._peer is not None else result
        self._operations.append(
            Recorded(kind.__name__, sender, memoryview(payload).nbytes, self._channel)
        )
        return result
