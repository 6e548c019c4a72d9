"""The driver over torch.distributed, for dense collectives.

It works on backends of its own, never on the user's process group, so that nothing it does is
ordered against the user's collectives. CPU tensors go through gloo, CUDA tensors through NCCL when
there is a backend for it (gloo copies them through the host otherwise).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any, Final, TypeVar

import torch

from offbeat.errors import PeerError, UnsupportedError
from offbeat.transport.backends import Backend, BackendWork
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import DenseOperation, Operation, kind_of
from offbeat.transport.sockets import (
    SocketAddresses,
    closed_in_children,
    keep_from_programs,
    shut_down,
)

T = TypeVar("T")


GIVE_UP_S: Final = 0.5
"""How long after its connections were cut a wait may take to fail by itself."""

_TAG_OF_NOBODY = 1
_AT_ONCE: Final = timedelta(milliseconds=1)
_LOOK_S: Final = 0.25
"""How long a wait lasts before it looks whether the connections have been cut. A limit of the wait,
not of gloo's: the work goes on.
"""

_NCCL_POLL_S: Final = 0.0002


class C10d(Driver):
    """Dense collectives over `cpu` (gloo) and, for CUDA tensors, over `cuda` (NCCL).

    Args:
        cpu: a gloo backend that nobody else uses.
        cuda: an NCCL backend of the same ranks, or None.
        sockets: those of `cpu`.
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
        self._cause: PeerError | None = None
        self._waits: dict[object, float] = {}
        self._tickets: weakref.WeakSet[_DenseTicket] = weakref.WeakSet()
        self.rank = cpu.rank()
        self.world_size = cpu.size()

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                ticket = _DenseTicket(self, operation)
                self._tickets.add(ticket)
                return ticket
            case _:
                raise UnsupportedError(
                    f"gloo and NCCL carry dense operations, not {kind_of(operation)}; use the peers"
                    " driver for messages"
                )

    def close(self) -> None:
        self._close()

    def _close(self, *under_way: BackendWork) -> None:
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
        backend = self._cuda if tensor.is_cuda and self._cuda is not None else self._cpu
        if backend is None:
            raise PeerError(
                f"rank {self.rank} has closed its connections; nothing can be sent or received any"
                " more"
            )
        return backend

    def finish(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that may wait for peers.

        Its RuntimeErrors, which mean that some connection failed, become `PeerError`: the cause,
        where the driver was cut.
        """
        with self._waiting():
            try:
                result = call()
            except RuntimeError as error:
                # What the traceback holds would keep gloo's thread and sockets as long as itself.
                clear_frames(error.__traceback__)
                if self._cause is not None:
                    raise PeerError(str(self._cause), rank=self._cause.rank) from error
                raise PeerError(
                    f"a connection failed during {what}: {str(error).splitlines()[0]}"
                ) from error
        if self._cause is not None:
            # NCCL reports nothing: what was under way is over, and its tensors hold anything.
            raise PeerError(str(self._cause), rank=self._cause.rank)
        return result

    def wait(self, work: BackendWork) -> None:
        """Return when `work` is over. Gives up, with the cause, soon after the driver was cut."""
        give_up_s = math.inf
        while True:
            begin_s = time.monotonic()
            if self._cause is not None:
                give_up_s = min(give_up_s, begin_s + GIVE_UP_S)
                if begin_s >= give_up_s:
                    self._close(work)
                    raise PeerError(str(self._cause), rank=self._cause.rank)
            # NCCL's own wait only orders streams, and a stream goes on after an abort as if all
            # were well. So this thread waits itself.
            if self._cuda is not None and not work.is_completed():
                time.sleep(_NCCL_POLL_S)
                continue
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
            self._driver.wait(self._work)
        return self._operation.finish(self._driver)


def _let_go(backend: list[Backend], works: Sequence[BackendWork]) -> None:
    """End a backend once `works` are over. Its destructor joins its threads, so it must not run
    before, and on no thread that has anything else to do.
    """
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    backend.clear()
