"""The driver over torch.distributed: dense collectives, and point-to-point messages where nothing
better connects the ranks.

It works on backends of its own, never on the user's process group, so that nothing it does is
ordered against the user's collectives. CPU tensors go through gloo, CUDA tensors through NCCL when
there is a backend for it (gloo copies them through the host otherwise).

What gloo demands, and why the code looks as it does:
- a wait that times out closes that pair for good, so no wait is ever given a short timeout;
- a dropped send handle loses the message, so handles are kept until they are complete;
- a receive must know its length, so a header of (channel, length) goes ahead of each message.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

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

T = TypeVar("T")


_TAG = 0


class C10d(Driver):
    """Dense collectives over `cpu` (gloo) and, for CUDA tensors, over `cuda` (NCCL).

    Args:
        cpu: a gloo backend that nobody else uses.
        cuda: an NCCL backend of the same ranks, or None.
    """

    def __init__(self, cpu: Backend, cuda: Backend | None = None) -> None:
        self._cpu: Backend | None = cpu
        self._cuda: Backend | None = cuda
        self.rank = cpu.rank()
        self.world_size = cpu.size()
        self._inbox: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._in_flight: list[tuple[BackendWork, torch.Tensor]] = []

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case DenseOperation():
                return _DenseTicket(self, operation)
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
        # A backend closes its connections when the last reference to it goes.
        self._cpu = self._cuda = None
        self._in_flight.clear()

    def backend_for(self, tensor: torch.Tensor) -> Backend:
        """The backend that carries `tensor`. Raises `PeerError` when this driver is closed."""
        backend = self._cuda if tensor.is_cuda and self._cuda is not None else self._cpu
        if backend is None:
            raise PeerError(
                f"rank {self.rank} has closed its connections; nothing can be sent or received any"
                " more"
            )
        return backend

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


def _mapped(what: str, call: Callable[[], T]) -> T:
    """Run a c10d call, turning its RuntimeErrors, which mean that some connection failed, into
    `PeerError`.
    """
    try:
        return call()
    except RuntimeError as error:
        raise PeerError(
            f"a connection failed during {what}: {str(error).splitlines()[0]}"
        ) from error


class _DenseTicket:
    """A dense operation under way on a backend."""

    def __init__(self, driver: C10d, operation: DenseOperation) -> None:
        self._driver = driver
        self._operation = operation
        self._work = self._mapped(lambda: operation.begin(driver))

    def done(self) -> bool:
        # What has not begun is carried out inside `wait`, which then blocks.
        return self._work is not None and bool(self._work.is_completed())

    def wait(self) -> Any:
        if self._work is not None:
            self._mapped(self._work.wait)
        return self._mapped(lambda: self._operation.finish(self._driver))

    def _mapped(self, call: Callable[[], T]) -> T:
        return _mapped(self._operation.kind, call)


class _Receive:
    def __init__(self, driver: C10d, peer: int, channel: int) -> None:
        self._driver, self._peer, self._channel = driver, peer, channel

    def done(self) -> bool:
        return self._driver.has_message(self._peer, self._channel)

    def wait(self) -> bytes:
        receive = lambda: self._driver.receive(self._peer, self._channel)  # noqa: E731
        message: bytes = _mapped(f"a receive from rank {self._peer}", receive)
        return message
