"""The driver over torch.distributed: dense collectives, and point-to-point messages where nothing
better connects the ranks.

It works on backends of its own, never on the user's process group, so that nothing it does is
ordered against the user's collectives. CPU tensors go through gloo, CUDA tensors through NCCL when
there is a backend for it (gloo copies them through the host otherwise).

What gloo demands, and why the code looks as it does:
- a wait that times out closes that pair for good, so no wait is ever given a short timeout;
- a dropped send handle loses the message, so handles are kept until they are complete;
- a receive must know its length, so a header of (channel, length) goes ahead of each message;
- a peer that is frozen or cut off is waited for without end, and `abort` frees nothing: `cut` shuts
  the sockets down, at which every wait fails at once;
- a collective that fails while a message to it is on its way leaves a connection that gloo never
  reads again: other waits on it, and with them the backend's destructor, would never end. Therefore
  the last wait of all is given a short timeout.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any, Final, TypeVar

import torch

from offbeat.errors import PeerError, UnsupportedError
from offbeat.transport.backends import Backend, BackendWork
from offbeat.transport.driver import Driver, Finished, Ticket
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
    bytes_as_tensor,
)
from offbeat.transport.sockets import (
    SocketAddresses,
    closed_in_children,
    keep_from_programs,
    shut_down,
)

T = TypeVar("T")


_TAG = 0
_TAG_OF_NOBODY = 1
_AT_ONCE: Final = timedelta(milliseconds=1)

_POLL_S: Final = 0.0002


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
        self._inbox: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._in_flight: list[tuple[BackendWork, torch.Tensor]] = []

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                ticket = _DenseTicket(self, operation)
                self._tickets.add(ticket)
                return ticket
            case Send(peer, payload):
                self._send(peer, channel, payload)
                return Finished()
            case Recv(peer, timeout_s):
                if timeout_s is not None:
                    raise UnsupportedError(
                        "a receive over gloo or NCCL cannot have a time limit; use the peers driver"
                    )
                return _Receive(self, peer, channel)
            case Sleep(seconds):
                time.sleep(seconds)
                return Finished()
            case Now():
                return Finished(time.monotonic())
            case RecvAny() | Post():
                raise UnsupportedError(
                    "gloo and NCCL cannot receive from anybody; use the peers driver"
                )

    def close(self) -> None:
        if self._cpu is None:
            return
        # A backend closes its sockets when the last reference to it goes, and the traceback of an
        # error may hold one for long. The peers must not wait for that.
        self._end_connections()
        self._forget()
        self._cpu = self._cuda = None
        self._in_flight.clear()
        for ticket in list(self._tickets):
            ticket.forget()

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
        self._end_connections()

    def _end_connections(self) -> None:
        """Let every wait on gloo's connections fail, on any thread."""
        shut_down(self._sockets)
        backend = self._cpu
        if backend is None:
            return
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

    def await_work(self, work: BackendWork) -> None:
        """Return when `work` is over."""
        # NCCL's own wait only orders streams, and a stream goes on after an abort as if all were
        # well. So this thread waits itself.
        while self._cuda is not None and not work.is_completed():
            time.sleep(_POLL_S)
        work.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        token = object()
        self._waits[token] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[token]

    def _send(self, peer: int, channel: int, payload: Payload) -> None:
        body = bytes_as_tensor(payload)
        header = torch.tensor([channel, body.numel()], dtype=torch.int64)
        backend = self.backend_for(body)
        # A handle that is dropped before it is complete loses its message, and so does a tensor.
        self._in_flight = [
            (work, tensor) for work, tensor in self._in_flight if not work.is_completed()
        ]
        for tensor in (header, body):
            self._in_flight.append((backend.send([tensor], peer, _TAG), tensor))

    def receive(self, peer: int, channel: int) -> bytes:
        """Block until the next message from `peer` on `channel`; others that come first
        are kept.
        """
        waiting = self._inbox[peer, channel]
        while not waiting:
            header = torch.empty(2, dtype=torch.int64)
            backend = self.backend_for(header)
            backend.recv([header], peer, _TAG).wait()
            body = torch.empty(int(header[1]), dtype=torch.uint8)
            backend.recv([body], peer, _TAG).wait()
            self._inbox[peer, int(header[0])].append(body.numpy().tobytes())
        return waiting.popleft()

    def has_message(self, peer: int, channel: int) -> bool:
        """Whether a message has already been taken off the wire; gloo cannot say more without
        blocking.
        """
        return bool(self._inbox[peer, channel])


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

    def forget(self) -> None:
        """Let the backend's handle go, which keeps the connections."""
        self._work = None

    def _finish(self) -> Any:
        if self._work is not None:
            self._driver.await_work(self._work)
        return self._operation.finish(self._driver)


class _Receive:
    def __init__(self, driver: C10d, peer: int, channel: int) -> None:
        self._driver, self._peer, self._channel = driver, peer, channel

    def done(self) -> bool:
        return self._driver.has_message(self._peer, self._channel)

    def wait(self) -> bytes:
        return self._driver.finish(
            f"a receive from rank {self._peer}",
            lambda: self._driver.receive(self._peer, self._channel),
        )
