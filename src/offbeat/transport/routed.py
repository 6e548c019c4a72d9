"""The driver of a session: dense collectives over torch.distributed, messages over ZeroMQ.

The dense side works on backends of its own, never on the user's process group, so that nothing it
does is ordered against the user's collectives. CPU tensors go through gloo, CUDA tensors through
NCCL when there is a backend for it (gloo copies them through the host otherwise).

What gloo demands, and why the code looks as it does:
- a peer that is frozen or cut off is waited for without end, and `abort` frees nothing: `cut` shuts
  the sockets down, at which what is queued fails at once;
- a message that was being read or written at that moment is forgotten, and what waits for it waits
  for as long as gloo's own limit, one day: this driver gives such a wait up, and leaves the backend
  to a thread, since its destructor waits too;
- a collective that fails while a message to it is on its way leaves a connection that gloo never
  reads again: other waits on it, and with them the backend's destructor, would never end. Therefore
  the last wait of all is given a short timeout, which closes gloo's connections for good.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from traceback import clear_frames
from typing import Any, Final, TypeVar

import torch

from offbeat.errors import OffbeatError, PeerError
from offbeat.transport.backends import Backend, BackendWork
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import DenseOperation, Operation
from offbeat.transport.peers import Peers
from offbeat.transport.sockets import (
    SocketAddresses,
    closed_in_children,
    keep_alive,
    keep_from_programs,
    shut_down,
)

T = TypeVar("T")


CAUSE_TIMEOUT_S = 5.0
"""How long a broken dense collective waits to learn whose death broke it."""

LOOK_S: Final = 0.2
"""From one look to the next."""

GIVE_UP_S: Final = 0.5
"""How long after its connections were cut a wait may take to fail by itself."""

_TAG_OF_NOBODY = 1
_AT_ONCE: Final = timedelta(milliseconds=1)
_LOOK_S: Final = 0.25
"""How long a wait on gloo lasts before it looks whether the connections have been cut. A limit of
the wait, not of gloo's: the work goes on.
"""


class C10d(Driver):
    """Dense collectives over `cpu` (gloo) and, for CUDA tensors, over `cuda` (NCCL).

    Args:
        cpu: a gloo backend that nobody else uses.
        cuda: an NCCL backend of the same ranks, or None.
        sockets: those of `cpu`.

    Attributes:
        explain: makes an error that names the rank at fault of one that may not.
    """

    def __init__(
        self,
        cpu: Backend,
        cuda: Backend | None = None,
        *,
        sockets: SocketAddresses = SocketAddresses(),
    ) -> None:
        self._cpu: Backend | None = cpu
        self._cuda: Backend | None = cuda
        self._sockets = sockets
        self._forget = closed_in_children(sockets)
        keep_from_programs(sockets)
        keep_alive(sockets)
        self.explain: Callable[[PeerError], PeerError] = lambda error: error
        self._cause: PeerError | None = None
        self._waits: dict[object, float] = {}
        self._tickets: weakref.WeakSet[_DenseTicket] = weakref.WeakSet()
        self.rank = cpu.rank()
        self.world_size = cpu.size()

    def start(self, operation: Operation, channel: int) -> Ticket:
        assert isinstance(operation, DenseOperation), "`Routed` gives messages to the peers"
        ticket = _DenseTicket(self, operation)
        self._tickets.add(ticket)
        return ticket

    def close(self, *under_way: BackendWork) -> None:
        """Close, although some waits on gloo may never end: those of `under_way`, and of tickets
        that nobody waits for.
        """
        backend, self._cpu = self._cpu, None
        if backend is None:
            return
        # A backend closes its sockets when the last reference to it goes, and the traceback of an
        # error may hold one for long. The peers must not wait for that.
        self._end_connections(backend)
        self._forget()
        self._cuda = None
        forgotten = [ticket.forget() for ticket in list(self._tickets)]
        works = [*under_way, *(work for work in forgotten if work is not None)]
        ending = threading.Thread(
            target=_let_go, args=([backend], works), name="offbeat-gloo-end", daemon=True
        )
        del backend
        ending.start()
        ending.join(GIVE_UP_S)

    def cut(self, cause: PeerError) -> None:
        """End all that is under way and refuse what comes, with `cause`. May be called from any
        thread.
        """
        if self._cause is not None:
            return
        self._cause = cause
        if self._cuda is not None:
            with suppress(RuntimeError):
                self._cuda.abort()
        if (backend := self._cpu) is not None:
            self._end_connections(backend)

    def _end_connections(self, backend: Backend) -> None:
        """Let waits on gloo's connections fail, on any thread, but those in the middle of a
        message.
        """
        shut_down(self._sockets)
        # Where gloo was in the middle of a message to a collective that has failed, it does not
        # read, and so does not see the end of the connection. A receive that times out makes it
        # close all of its connections. The first does; the others fail at once.
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    backend.recv([nothing], peer, _TAG_OF_NOBODY).wait(_AT_ONCE)

    def waits_for_s(self) -> float:
        """For how long this rank has been waiting for its peers within one operation; 0 when it
        does not. May be called from any thread.
        """
        begun_s = min(list(self._waits.values()), default=None)
        return 0.0 if begun_s is None else time.monotonic() - begun_s

    def backend_for(self, tensor: torch.Tensor) -> Backend:
        """The backend that carries `tensor`. Raises `PeerError` when this driver is closed."""
        if self._cause is not None:
            raise PeerError(str(self._cause), rank=self._cause.rank)
        backend = self._cuda if self.uses_nccl(tensor.device) else self._cpu
        if backend is None:
            raise PeerError(
                f"rank {self.rank} has closed its connections; nothing can be sent or received any"
                " more"
            )
        return backend

    def uses_nccl(self, device: torch.device) -> bool:
        """Whether NCCL carries tensors of `device`."""
        return device.type == "cuda" and self._cuda is not None

    def finish(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that may wait for peers.

        Its RuntimeErrors, which mean that some connection failed, become `PeerError`: the cause,
        where the driver was cut.
        """
        try:
            with self._waiting():
                try:
                    result = call()
                except RuntimeError as error:
                    # The traceback would keep gloo's thread and sockets as long as itself.
                    clear_frames(error.__traceback__)
                    if self._cause is not None:
                        raise PeerError(str(self._cause), rank=self._cause.rank) from error
                    raise PeerError(
                        f"a connection failed during {what}: {str(error).splitlines()[0]}"
                    ) from error
            if self._cause is not None:
                # NCCL reports nothing: what was under way is over, and its tensors hold anything.
                raise PeerError(str(self._cause), rank=self._cause.rank)
        except PeerError as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        return result

    def wait(self, work: BackendWork, device: torch.device = torch.device("cpu")) -> None:
        """Return when `work` on tensors of `device` is over. Gives up, with the cause, soon after
        the driver was cut.
        """
        if self.uses_nccl(device):
            # With a limit, NCCL would end the communicator of whatever takes longer. Without one
            # its wait only orders streams, and a stream goes on after an abort as if all were well.
            # So this thread waits itself: an abort, which `cut` makes, ends that, too.
            work.wait()
            torch.cuda.current_stream(device).synchronize()
            return
        give_up_s = math.inf
        while True:
            begin_s = time.monotonic()
            if self._cause is not None:
                give_up_s = min(give_up_s, begin_s + GIVE_UP_S)
                if begin_s >= give_up_s:
                    self.close(work)
                    raise PeerError(str(self._cause), rank=self._cause.rank)
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                # Not every kind of work tells by `is_completed` that it has failed.
                if time.monotonic() < begin_s + _LOOK_S:
                    raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        token = object()
        self._waits[token] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[token]


class _DenseTicket:
    """A dense operation under way on a backend."""

    def __init__(self, driver: C10d, operation: DenseOperation) -> None:
        self._driver = driver
        self._operation = operation
        self._work = driver.finish(operation.kind, lambda: operation.begin(driver))

    def done(self) -> bool:
        # What has not begun is carried out inside `wait`, which then blocks.
        return self._work is not None and bool(self._work.is_completed())

    def wait(self) -> Any:
        return self._driver.finish(self._operation.kind, self._finish)

    def forget(self) -> BackendWork | None:
        """Let the backend's handle go, which keeps the connections."""
        work, self._work = self._work, None
        return work

    def _finish(self) -> Any:
        if self._work is not None:
            self._driver.wait(self._work, self._operation.device)
        return self._operation.finish(self._driver)


def _let_go(backend: list[Backend], works: Sequence[BackendWork]) -> None:
    """End a backend once `works` are over. Its destructor joins its threads, so it must not run
    before, and on no thread that has anything else to do.
    """
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    backend.clear()


class Routed(Driver):
    """Performs dense collectives on `dense` and everything else on `messages`. Closes both.

    gloo reports that a connection broke, but not which rank died; the message side knows who is
    dead. So a failure of the first gets its cause from the second.

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
        dense.explain = lambda error: _with_cause(error, messages)
        self._watches = [Watch(dense, messages.dead)]

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                return self._dense.start(operation, channel)
            case _:
                return self._messages.start(operation, channel)

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        self._messages.abort(reason, blame=blame)

    def end_training(self, channel: int) -> None:
        # In this order: a peer whose collective breaks finds the reason among its messages.
        self._messages.end_training(channel)
        self._dense.close()

    def departed(self) -> frozenset[int]:
        return self._messages.departed()

    def tie(self, others: SocketAddresses) -> None:
        """End these connections too when a rank is dead, whoever waits for it there."""
        self._watches.append(Watch(_Tied(self.rank, others), self._messages.dead))

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._messages.close()
        self._on_closed(self._messages.lost)
        self._dense.close()


def _with_cause(error: PeerError, messages: Peers) -> PeerError:
    """The error of a broken dense collective, with the name of the rank that broke it, if that can
    be learnt.
    """
    if error.rank is not None:
        return error
    # One that has left says so before its connections close, so there is nothing to wait for.
    departed = messages.departures()
    if not departed:
        # gloo may see the broken connection before the heartbeats of ZeroMQ have given it up.
        messages.wait_for_death(CAUSE_TIMEOUT_S)
        departed = messages.departures()
    if not departed:
        return error
    rank, reason = next(iter(departed.items()))
    how = str(error).partition(": ")[0]  # without what gloo says of its own sources
    return PeerError(
        f"rank {rank} {reason} (rank {messages.rank} learnt of it by this: {how})", rank=rank
    )


@dataclass(frozen=True, slots=True)
class _Tied:
    """Connections of other libraries, which do not say whether they wait."""

    rank: int
    connections: SocketAddresses

    def waits_for_s(self) -> float:
        return math.inf

    def cut(self, cause: PeerError) -> None:
        shut_down(self.connections)


class Watch:
    """Ends dense collectives that wait for a rank that is dead: a thread looks now and then, until
    `close`.

    gloo and NCCL notice a process that has ended, but wait for ever for one that is frozen or cut
    off. The message side knows who is dead. While this rank waits within a dense collective, the
    thread asks it, and then cuts the dense side's connections, which ends the wait with an error
    that names that rank.

    Args:
        dense: what is cut.
        dead: the dead ranks and why, the first to blame first. Asked only while `dense` waits; must
            not block for long.
        limit_s: the longest wait, where no work of the user's can lie behind one; None for any.
    """

    def __init__(
        self,
        dense: C10d | _Tied,
        dead: Callable[[], Mapping[int, str]],
        *,
        limit_s: float | None = None,
    ) -> None:
        self._dense = dense
        self._dead = dead
        self._limit_s = limit_s
        self._was_dead = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except OffbeatError:  # the message side is closed, and this will be in a moment
                return

    def _look(self) -> None:
        waits_for_s = self._dense.waits_for_s()
        dead = self._dead() if waits_for_s > LOOK_S else {}
        # What a rank sent before it died still counts: an operation to which all have contributed
        # ends between two looks.
        if dead and self._was_dead:
            rank, reason = next(iter(dead.items()))
            self._dense.cut(
                PeerError(
                    f"rank {rank} {reason} (rank {self._dense.rank} waited for it in a dense"
                    " collective)",
                    rank=rank,
                )
            )
        elif self._limit_s is not None and waits_for_s > self._limit_s:
            self._dense.cut(PeerError(f"no rank answered for {self._limit_s:g} s"))
        self._was_dead = bool(dead)
