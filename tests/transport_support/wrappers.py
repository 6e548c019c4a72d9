"""Drivers around a driver that tests alone need: one lets faults happen where a script says, one
records the sequence of operations for golden schedules.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from offbeat.errors import ConfigError, PeerError
from offbeat.transport.driver import Driver, Finished, Ticket, Wrapper
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

Action = Literal["raise", "drop", "corrupt", "kill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedFault:
    """One thing that goes wrong, once, at the first matching operation.

    Attributes:
        rank: where.
        step: when: the marked training step.
        operation: class of the operation, such as `Send`.
        action: "raise" a `PeerError`; "drop" a message; "corrupt" one bit of a message before it is
            checksummed, as faulty memory would; "kill" this process with SIGKILL.
    """

    rank: int
    step: int
    operation: type[Operation]
    action: Action

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(
                f"a fault's action is {self.action!r}, allowed are {', '.join(get_args(Action))}"
            )
        if self.action in ("drop", "corrupt") and self.operation is not Send:
            raise ConfigError(
                f"{self.operation.__name__} cannot be made to {self.action}, only Send can; use"
                " 'raise' or 'kill'"
            )


class Failing(Wrapper):
    """Lets `faults` happen.

    Attributes:
        waiting: this rank's faults that have not happened, in the order given; an honest record
            names those left at the end.
    """

    def __init__(self, inner: Driver, faults: Sequence[ScriptedFault]) -> None:
        super().__init__(inner)
        self.waiting = [fault for fault in faults if fault.rank == self.rank]

    def start(self, operation: Operation, channel: int) -> Ticket:
        for fault in self.waiting:
            if fault.step == self.step and isinstance(operation, fault.operation):
                self.waiting.remove(fault)
                return self._fail(fault, operation, channel)
        return self.inner.start(operation, channel)

    def _fail(self, fault: ScriptedFault, operation: Operation, channel: int) -> Ticket:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "corrupt" and isinstance(operation, Send):
            return self.inner.start(Send(operation.peer, _flip_a_bit(operation.payload)), channel)
        if fault.action == "drop":
            return Finished()
        name = fault.operation.__name__
        return Finished(
            error=PeerError(
                f"scripted fault: {name} of rank {self.rank} failed in step {self.step}",
                rank=self.rank,
            )
        )


def _flip_a_bit(payload: Payload) -> bytes:
    altered = bytearray(payload)
    if altered:
        altered[len(altered) // 2] ^= 1
    return bytes(altered)


class Recorded(NamedTuple):
    """One operation.

    Attributes:
        kind: that of the operation.
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
        kind = operation.kind
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
