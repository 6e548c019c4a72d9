"""One driver made of two: dense collectives go through torch.distributed, messages between two
ranks through ZeroMQ.

gloo reports that a connection broke, but not which rank died; the ZeroMQ side knows which rank died
but carries no dense collective. Here a failure of the first gets its cause from the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.errors import PeerError
from offbeat.transport.c10d import C10d
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import DenseOperation, Operation
from offbeat.transport.peers import Peers

CAUSE_TIMEOUT_S = 5.0
"""How long a broken dense collective waits to learn whose death broke it."""


class Routed(Driver):
    """Performs dense collectives on `dense` and everything else on `messages`. Closes both.

    `on_lost` is told, at the end, with which ranks the connection was lost.
    """

    def __init__(
        self,
        dense: C10d,
        messages: Peers,
        *,
        on_lost: Callable[[frozenset[int]], None] = lambda peers: None,
    ) -> None:
        self.rank = dense.rank
        self.world_size = dense.world_size
        self._dense = dense
        self._messages = messages
        self._on_lost = on_lost

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                try:
                    return _TicketWithCause(self._dense.start(operation, channel), self._messages)
                except PeerError as error:
                    raise _with_cause(error, self._messages) from error
            case _:
                return self._messages.start(operation, channel)

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        self._messages.abort(reason, blame=blame)

    def departed(self) -> frozenset[int]:
        return self._messages.departed()

    def close(self) -> None:
        self._messages.close()
        self._on_lost(self._messages.lost)
        self._dense.close()


class _TicketWithCause:
    """A dense collective's ticket whose error names the rank that died."""

    def __init__(self, ticket: Ticket, messages: Peers) -> None:
        self._ticket, self._messages = ticket, messages

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> Any:
        try:
            return self._ticket.wait()
        except PeerError as error:
            raise _with_cause(error, self._messages) from error


def _with_cause(error: PeerError, messages: Peers) -> PeerError:
    """The error of a broken dense collective, with the name of the rank that broke it, if that can
    be learnt.
    """
    # gloo may see the broken connection before the heartbeats of ZeroMQ have given it up.
    departed = messages.wait_for_death(CAUSE_TIMEOUT_S) or dict.fromkeys(
        messages.left(), "finished and closed its connections"
    )
    if not departed:
        return error
    rank, reason = next(iter(departed.items()))
    return PeerError(
        f"rank {rank} {reason} (rank {messages.rank} learnt of it by this: {error})", rank=rank
    )
