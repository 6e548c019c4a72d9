"""Faults that happen where a script says: at one rank, in one step, at one kind of operation."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import ConfigError, PeerError
from offbeat.transport.driver import Driver, Finished, Ticket
from offbeat.transport.operations import Operation, Payload, Send
from offbeat.transport.wrappers.base import Raised, Wrapper

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
        return Raised(
            PeerError(
                f"scripted fault: {name} of rank {self.rank} failed in step {self.step}",
                rank=self.rank,
            )
        )


def _flip_a_bit(payload: Payload) -> bytes:
    altered = bytearray(payload)
    if altered:
        altered[len(altered) // 2] ^= 1
    return bytes(altered)
