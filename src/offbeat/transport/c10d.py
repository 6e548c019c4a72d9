"""The driver over torch.distributed: dense collectives, and point-to-point messages where nothing better connects the ranks.

It works on process groups of its own, so that nothing it does is ordered against the user's collectives. CPU tensors go
through gloo, CUDA tensors through NCCL when a group for it was made (gloo copies them through the host otherwise).

What gloo demands, and why the code looks as it does:
- a wait that times out closes that pair for good, so no wait is ever given a short timeout;
- a dropped `isend` handle loses the message, so handles are kept until they are complete;
- a receive must know its length, so a header of (channel, length) goes ahead of each message.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from offbeat.errors import PeerError, UnsupportedError
from offbeat.transport.driver import Driver, Finished, Ticket
from offbeat.transport.operations import AllGather, AllReduce, Broadcast, Now, Operation, Recv, Send, Sleep


class C10d(Driver):
    """Dense collectives over `cpu_group` (gloo) and, for CUDA tensors, `cuda_group` (NCCL).

    Args:
        cpu_group: a gloo group that nobody else uses; closed with the driver.
        cuda_group: an NCCL group of the same ranks, or None.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, cuda_group: dist.ProcessGroup | None = None) -> None:
        self._cpu_group: dist.ProcessGroup | None = cpu_group
        self._cuda_group = cuda_group
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)
        self._inbox: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case AllReduce(tensor):
                begin = lambda: dist.all_reduce(tensor, group=self._group_of(tensor), async_op=True)  # noqa: E731
                return _Work(begin, tensor, "all-reduce")
            case Broadcast(tensor, root):
                begin = lambda: dist.broadcast(tensor, group_src=root, group=self._group_of(tensor), async_op=True)  # noqa: E731
                return _Work(begin, tensor, "broadcast")
            case AllGather(payload):
                return _Later(lambda: self._all_gather(payload), "all-gather")
            case Send(peer, payload):
                self._send(peer, channel, payload)
                return Finished()
            case Recv(peer, timeout_s):
                if timeout_s is not None:
                    raise UnsupportedError("a receive over gloo or NCCL cannot have a time limit; use the peers driver")
                return _Receive(self, peer, channel)
            case Sleep(seconds):
                time.sleep(seconds)
                return Finished()
            case Now():
                return Finished(time.monotonic())

    def close(self) -> None:
        groups, self._cpu_group, self._cuda_group = (self._cpu_group, self._cuda_group), None, None
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._in_flight.clear()

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        group = self._cuda_group if tensor.is_cuda and self._cuda_group is not None else self._cpu_group
        if group is None:
            raise PeerError("the driver is closed")
        return group

    def _all_gather(self, payload: bytes | bytearray | memoryview) -> list[bytes]:
        group = self._group_of(torch.empty(0))
        mine = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        lengths = torch.zeros(self.world_size, dtype=torch.int64)
        lengths[self.rank] = mine.numel()
        dist.all_reduce(lengths, group=group)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=group)
        return [block[:length].numpy().tobytes() for block, length in zip(gathered, lengths.tolist(), strict=True)]

    def _send(self, peer: int, channel: int, payload: bytes | bytearray | memoryview) -> None:
        body = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        header = torch.tensor([channel, body.numel()], dtype=torch.int64)
        group = self._group_of(body)
        self._in_flight = [(work, tensor) for work, tensor in self._in_flight if not work.is_completed()]
        for tensor in (header, body):
            self._in_flight.append((dist.isend(tensor, group_dst=peer, group=group), tensor))

    def receive(self, peer: int, channel: int) -> bytes:
        """Block until the next message from `peer` on `channel`; others that come first are kept."""
        waiting = self._inbox[peer, channel]
        while not waiting:
            header = torch.empty(2, dtype=torch.int64)
            group = self._group_of(header)
            dist.recv(header, group_src=peer, group=group)
            body = torch.empty(int(header[1]), dtype=torch.uint8)
            dist.recv(body, group_src=peer, group=group)
            self._inbox[peer, int(header[0])].append(body.numpy().tobytes())
        return waiting.popleft()

    def has_message(self, peer: int, channel: int) -> bool:
        """Whether a message has already been taken off the wire; gloo cannot say more without blocking."""
        return bool(self._inbox[peer, channel])


def _mapped(what: str, call: Callable[[], Any]) -> Any:
    """Run a c10d call, turning its RuntimeErrors, which mean that some connection failed, into `PeerError`."""
    try:
        return call()
    except RuntimeError as error:
        raise PeerError(f"a connection failed during {what}: {str(error).splitlines()[0]}") from error


class _Work:
    """A dense collective begun asynchronously."""

    def __init__(self, begin: Callable[[], Any], tensor: torch.Tensor, what: str) -> None:
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
