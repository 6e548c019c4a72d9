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
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store

from offbeat.errors import PeerError, UnsupportedError
from offbeat.transport.driver import Driver, Finished, Ticket
from offbeat.transport.operations import (
    AllGather,
    AllReduce,
    Broadcast,
    Now,
    Operation,
    Payload,
    Post,
    Recv,
    RecvAny,
    Send,
    Sleep,
)


class Work(Protocol):
    """torch's handle of an operation under way."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class Backend(Protocol):
    """What gloo's and NCCL's process groups have in common, which torch's stubs do not say."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Work: ...

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


WAIT_LIMIT = timedelta(days=1)
"""A peer may be slow for long; that it is dead shows in its connections."""

_TAG = 0


def gloo_backend(
    store: Store, rank: int, world_size: int, *, address: str, connect_limit_s: float
) -> Backend:
    """A gloo backend whose sockets are bound to `address`. Collective: returns when all ranks have
    made theirs.

    Args:
        store: where the ranks find each other; its keys must not have been used by an earlier
            backend.
        rank: this rank.
        world_size: number of ranks.
        address: numeric address of this host.
        connect_limit_s: how long that may take, > 0.

    Raises:
        RuntimeError: it took longer.
    """
    # absent from the stubs
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=connect_limit_s)
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    backend._set_default_timeout(WAIT_LIMIT)
    return cast(Backend, backend)


def nccl_backend(store: Store, rank: int, world_size: int) -> Backend:
    """An NCCL backend, for the current CUDA device."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = WAIT_LIMIT
    return cast(Backend, dist.ProcessGroupNCCL(store, rank, world_size, options))


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
        self._in_flight: list[tuple[Work, torch.Tensor]] = []

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case AllReduce(tensor):
                backend = self._backend_of(tensor)
                return _Work(
                    lambda: backend.allreduce([tensor], dist.AllreduceOptions()),
                    tensor,
                    "all-reduce",
                )
            case Broadcast(tensor, root):
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = root, 0
                backend = self._backend_of(tensor)
                return _Work(lambda: backend.broadcast([tensor], options), tensor, "broadcast")
            case AllGather(payload):
                return _Later(lambda: self._all_gather(payload), "all-gather")
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

    def _backend_of(self, tensor: torch.Tensor) -> Backend:
        backend = self._cuda if tensor.is_cuda and self._cuda is not None else self._cpu
        if backend is None:
            raise PeerError(
                f"rank {self.rank} has closed its connections; nothing can be sent or received any"
                " more"
            )
        return backend

    def _all_gather(self, payload: Payload) -> list[bytes]:
        mine = _as_tensor(payload)
        backend = self._backend_of(mine)
        lengths = torch.zeros(self.world_size, dtype=torch.int64)
        lengths[self.rank] = mine.numel()
        backend.allreduce([lengths], dist.AllreduceOptions()).wait()
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        if padded.numel():
            backend.allgather([gathered], [padded]).wait()
        return [
            block[:length].numpy().tobytes()
            for block, length in zip(gathered, lengths.tolist(), strict=True)
        ]

    def _send(self, peer: int, channel: int, payload: Payload) -> None:
        body = _as_tensor(payload)
        header = torch.tensor([channel, body.numel()], dtype=torch.int64)
        backend = self._backend_of(body)
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
            backend = self._backend_of(header)
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


def _as_tensor(payload: Payload) -> torch.Tensor:
    """A copy of the bytes, shape (len(payload),), uint8."""
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())


def _mapped(what: str, call: Callable[[], Any]) -> Any:
    """Run a c10d call, turning its RuntimeErrors, which mean that some connection failed, into
    `PeerError`.
    """
    try:
        return call()
    except RuntimeError as error:
        raise PeerError(
            f"a connection failed during {what}: {str(error).splitlines()[0]}"
        ) from error


class _Work:
    """A dense collective begun asynchronously."""

    def __init__(self, begin: Callable[[], Work], tensor: torch.Tensor, what: str) -> None:
        self._what = what
        self._tensor = tensor
        self._work = _mapped(what, begin)

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        _mapped(self._what, self._work.wait)
        return self._tensor


class _Later:
    """An operation that is carried out when somebody waits for it."""

    def __init__(self, call: Callable[[], Any], what: str) -> None:
        self._call = call
        self._what = what

    def done(self) -> bool:
        return False

    def wait(self) -> Any:
        return _mapped(self._what, self._call)


class _Receive:
    def __init__(self, driver: C10d, peer: int, channel: int) -> None:
        self._driver, self._peer, self._channel = driver, peer, channel

    def done(self) -> bool:
        return self._driver.has_message(self._peer, self._channel)

    def wait(self) -> bytes:
        receive = lambda: self._driver.receive(self._peer, self._channel)  # noqa: E731
        message: bytes = _mapped(f"a receive from rank {self._peer}", receive)
        return message
