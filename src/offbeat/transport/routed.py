"""One driver made of two: dense collectives go through torch.distributed, messages between two
ranks through ZeroMQ.

gloo reports that a connection broke, but not which rank died, and says nothing of one that is
frozen; the ZeroMQ side knows who is dead but carries no dense collective. Here a failure of the
first gets its cause from the second, and a wait of the first ends when the second knows of a death.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.errors import PeerError
from offbeat.transport.c10d import C10d
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.mesh import FINISHED, SESSION_ENDED
from offbeat.transport.operations import DenseOperation, Operation
from offbeat.transport.peers import Peers
from offbeat.transport.watch import Watch

CAUSE_TIMEOUT_S = 5.0
"""How long a broken dense collective waits to learn whose death broke it."""


class Routed(Driver):
    """Performs dense collectives on `dense` and everything else on `messages`. Closes both.

    `on_closed` is told, at the end, with which ranks the connection was lost.
    """

    def __init__(
        self,
        dense: C10d,
        messages: Peers,
        *,
        on_closed: Callable[[frozenset[int]], None] = lambda peers: None,
    ) -> None:
        self.rank = dense.rank
        self.world_size = dense.world_size
        self._dense = dense
        self._messages = messages
        self._on_closed = on_closed
        self._watch = Watch(dense, messages.dead)

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                try:
                    return _TicketWithCause(self._dense.start(operation, channel), self._messages)
                except PeerError as error:
                    raise _with_cause(error, self._messages) from error
            case _:
                return self._messages.start(operation, channel)

    def clock(self) -> Callable[[int], float]:
        return self._messages.clock()

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        self._messages.abort(reason, blame=blame)

    def end_training(self, channel: int) -> None:
        # In this order: a peer whose collective breaks finds the reason among its messages.
        self._messages.end_training(channel)
        self._dense.close()

    def departed(self) -> frozenset[int]:
        return self._messages.departed()

    def close(self) -> None:
        self._watch.close()
        self._messages.close()
        self._on_closed(self._messages.lost)
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
    if error.rank is not None:
        return error
    # One that has left says so before its connections close, so there is nothing to wait for.
    departed = messages.dead() or _in_good_order(messages)
    if not departed:
        # gloo may see the broken connection before the heartbeats of ZeroMQ have given it up.
        departed = messages.wait_for_death(CAUSE_TIMEOUT_S) or _in_good_order(messages)
    if not departed:
        return error
    rank, reason = next(iter(departed.items()))
    how = str(error).partition(": ")[0]  # without what gloo says of its own sources
    return PeerError(
        f"rank {rank} {reason} (rank {messages.rank} learnt of it by this: {how})", rank=rank
    )


def _in_good_order(messages: Peers) -> dict[int, str]:
    """The ranks that have ended their training or left, and what an error says of them."""
    ended = dict.fromkeys(messages.ended(), SESSION_ENDED)
    return ended | dict.fromkeys(messages.left(), FINISHED)
