"""The operations that a collective may yield. This vocabulary is the seam between protocols and
networks.

A collective is a generator: it yields operations, receives their results, and returns its own. It
never blocks, sleeps or names a backend, so the same generator trains over sockets, is tested under
a virtual clock and is simulated.

    def swap(peer: int, mine: Payload) -> Collective[Payload]:
        yield Send(peer, mine)
        theirs = yield Recv(peer)
        return theirs

Messages between two ranks on one channel arrive in the order they were sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat.transport.backends import BackendWork

if TYPE_CHECKING:
    from offbeat.transport.routed import C10d

T = TypeVar("T")

Payload: TypeAlias = bytes | bytearray | memoryview
"""Bytes of one message. The sender must not change them afterwards."""


class _Named:
    """Any operation."""

    __slots__ = ()

    kind: ClassVar[str]
    """The name in records; that of the class unless a subclass sets another one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__


@dataclass(frozen=True, slots=True)
class Send(_Named):
    """Hand `payload` over for delivery to rank `peer`; goes on at once. Result: None."""

    peer: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Recv(_Named):
    """Wait for the next message from rank `peer` on this channel. Result: its payload (`bytes` or
    `memoryview`).

    With `timeout_s`, raises `PeerTimeoutError` into the collective once that long has passed; the
    message is not lost and a later `Recv` may take it.
    """

    peer: int
    timeout_s: float | None = None

    @property
    def peers(self) -> frozenset[int]:
        """As of `RecvAny`."""
        return frozenset([self.peer])


@dataclass(frozen=True, slots=True)
class RecvAny(_Named):
    """Wait for the next message on this channel from any of `peers`. Result: a pair (rank,
    payload).

    A rank that names itself among `peers` also waits for what it posts to itself, so one receive
    can wait for the network and for another thread. Raises, into the collective, `PeerError` naming
    a rank of `peers` that is dead or has left once
    nothing is there to be taken, whether or not others still may send: leave it out and go on.
    Raises `PeerTimeoutError` as `Recv` does. No one else may receive on this channel with `Recv`.
    """

    peers: frozenset[int]
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Post(_Named):
    """Leave `payload` for this rank's own `RecvAny` on this channel: an event, not traffic. Result:
    None.
    """

    payload: Payload


@dataclass(frozen=True, slots=True)
class Sleep(_Named):
    """Let `seconds` pass. Result: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Now(_Named):
    """Result: the driver's monotonic clock, in seconds (virtual under the virtual driver)."""


class Traffic(NamedTuple):
    """What one rank has moved.

    Attributes:
        bytes_sent: payload bytes; headers and encryption come on top.
        bytes_received: payload bytes.
        messages_sent: number of messages.
        messages_received: number of messages.
        wait_s: time in which this rank did nothing but wait for its peers, in seconds.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    wait_s: float = 0.0


class DenseOperation(_Named, ABC):
    """An operation of all ranks together, such as an all-reduce, that a backend of PyTorch carries
    out as a whole.

    A subclass says everything that drivers and wrappers have to know of it, so that a new operation
    is one class. All ranks begin their dense operations in the same order, whatever the channel.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the tensor or payload that this rank brings."""

    @property
    def device(self) -> torch.device:
        """Of what it works on."""
        return torch.device("cpu")

    @property
    def root_rank(self) -> int | None:
        """The rank whose tensor everyone gets, along a tree, where there is one."""
        return None

    def traffic(self, result: Any, *, rank: int, world_size: int) -> Traffic:
        """What rank `rank` moves when the operation is carried out on a ring of `world_size` ranks:
        as much is sent as received, in `num_hops` messages.

        A backend may use another algorithm; these are the bytes that any bandwidth-optimal one
        moves.

        Args:
            result: what the operation returned on that rank; None while it is under way, which is
                asked in order to delay it.
            rank: whose share is asked for.
            world_size: number of ranks, >= 1.
        """
        hops = self.num_hops(world_size)
        num_bytes = math.ceil(hops * self.hop_bytes(self.num_bytes, world_size))
        return Traffic(
            bytes_sent=num_bytes,
            bytes_received=num_bytes,
            messages_sent=hops,
            messages_received=hops,
        )

    def num_hops(self, world_size: int) -> int:
        """How many messages follow each other on the ring, each of `hop_bytes`. This is how long
        the operation takes on the virtual network, unless it has a root.
        """
        return 2 * (world_size - 1)

    def hop_bytes(self, num_bytes: float, world_size: int) -> float:
        """Bytes of each of these messages, where a rank brings `num_bytes`."""
        return num_bytes / world_size

    @classmethod
    @abstractmethod
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        """The results of all ranks' operations, by rank, for drivers that hold all of them in one
        process: the virtual cluster and a world of one rank.

        Args:
            operations: one of each rank, by rank. Sums are formed in this order.
        """

    def begin(self, backends: C10d) -> BackendWork | None:
        """Begin the operation on a backend of PyTorch without waiting; None begins nothing, and
        leaves all of it to `finish`.
        """
        return None

    @abstractmethod
    def finish(self, backends: C10d) -> Any:
        """The result, once the work that `begin` returned is over. May block, in `backends.wait`
        alone.
        """


@dataclass(frozen=True, slots=True)
class _OfTensor(DenseOperation):
    """On a contiguous `tensor`, in place, which is the result."""

    tensor: torch.Tensor

    @property
    @override
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    @override
    def device(self) -> torch.device:
        return self.tensor.device

    @override
    def finish(self, backends: C10d) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True, slots=True)
class AllReduceTensor(_OfTensor):
    """Replace `tensor` (contiguous, any numeric dtype) by its sum over all ranks, in place. Result:
    the tensor.
    """

    kind: ClassVar[str] = "AllReduce"

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        tensors = [operation.tensor for operation in operations]
        if len(tensors) == 1:
            return tensors
        total = torch.stack(tensors).sum(dim=0)
        return [tensor.copy_(total) for tensor in tensors]

    @override
    def begin(self, backends: C10d) -> BackendWork:
        backend = backends.backend_for(self.tensor)
        return backend.allreduce([self.tensor], dist.AllreduceOptions())


@dataclass(frozen=True, slots=True)
class _OfEqualParts(_OfTensor):
    """`tensor` has as many equal parts as there are ranks, each rank's its own."""

    @override
    def num_hops(self, world_size: int) -> int:
        return world_size - 1


@dataclass(frozen=True, slots=True)
class ReduceScatterTensor(_OfEqualParts):
    """Replace this rank's part of `tensor` by its sum over all ranks, in place; the other parts
    are of no worth afterwards. Result: the tensor.
    """

    kind: ClassVar[str] = "ReduceScatter"

    received: list[torch.Tensor] = field(default_factory=list, init=False, compare=False)

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        tensors = [operation.tensor for operation in operations]
        total = torch.stack(tensors).sum(dim=0)
        for mine, part in zip(_parts_by_rank(tensors), total.chunk(len(tensors)), strict=True):
            mine.copy_(part)
        return tensors

    @override
    def begin(self, backends: C10d) -> BackendWork | None:
        backend, tensor = backends.backend_for(self.tensor), self.tensor
        if backends.uses_nccl(tensor.device):
            parts = list(tensor.chunk(backends.world_size))
            return backend.reduce_scatter(
                [parts[backends.rank]], [parts], dist.ReduceScatterOptions()
            )
        # gloo's own is an all-reduce, which sends twice the bytes.
        received = torch.empty_like(tensor)
        self.received.append(received)
        return backend.alltoall_base(received, tensor, [], [], dist.AllToAllOptions())

    @override
    def finish(self, backends: C10d) -> torch.Tensor:
        if self.received:
            parts = self.received.pop().view(backends.world_size, -1)
            torch.sum(parts, dim=0, out=self.tensor.chunk(backends.world_size)[backends.rank])
        return self.tensor


@dataclass(frozen=True, slots=True)
class AllGatherTensor(_OfEqualParts):
    """Replace each rank's part of `tensor` by what that rank has there, in place. Result: the
    tensor.
    """

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        tensors = [operation.tensor for operation in operations]
        whole = torch.cat(_parts_by_rank(tensors))
        return [tensor.copy_(whole) for tensor in tensors]

    @override
    def begin(self, backends: C10d) -> BackendWork | None:
        parts = list(self.tensor.chunk(backends.world_size))
        return backends.backend_for(self.tensor).allgather([parts], [parts[backends.rank]])


@dataclass(frozen=True, slots=True)
class Broadcast(_OfTensor):
    """Replace `tensor` (contiguous) by rank `root`'s, in place. Result: the tensor."""

    root: int

    @property
    @override
    def root_rank(self) -> int:
        return self.root

    @override
    def traffic(self, result: Any, *, rank: int, world_size: int) -> Traffic:
        """The tensor is passed on from rank to rank: each rank but the last one sends it, and each
        but the root receives it.
        """
        place = (rank - self.root) % world_size
        sends, receives = int(place < world_size - 1), int(place > 0)
        return Traffic(
            bytes_sent=sends * self.num_bytes,
            bytes_received=receives * self.num_bytes,
            messages_sent=sends,
            messages_received=receives,
        )

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        # In simulations one rank may stand for all.
        source = operations[operations[0].root % len(operations)].tensor
        return [operation.tensor.copy_(source) for operation in operations]

    @override
    def begin(self, backends: C10d) -> BackendWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.root, 0
        return backends.backend_for(self.tensor).broadcast([self.tensor], options)


@dataclass(frozen=True, slots=True)
class AllGather(DenseOperation):
    """Give `payload` to every rank. Result: a list of every rank's payload, by rank. Lengths may
    differ.

    For control (comparing configurations, agreeing on a plan), where the driver's own dense
    operation serves. Sparse collectives use `collectives.gather`, which is made of `Send` and
    `Recv`.
    """

    payload: Payload

    @property
    @override
    def num_bytes(self) -> int:
        return memoryview(self.payload).nbytes

    @override
    def traffic(self, result: Any, *, rank: int, world_size: int) -> Traffic:
        """Each rank sends every payload but its successor's, and receives every one but its own.

        While the result is not there, all payloads are taken to be as long as this rank's.
        """
        payloads = [self.payload] * world_size if result is None else result
        sizes = [memoryview(payload).nbytes for payload in payloads]
        return Traffic(
            bytes_sent=sum(sizes) - sizes[(rank + 1) % world_size],
            bytes_received=sum(sizes) - sizes[rank],
            messages_sent=world_size - 1,
            messages_received=world_size - 1,
        )

    @override
    def num_hops(self, world_size: int) -> int:
        return world_size - 1

    @override
    def hop_bytes(self, num_bytes: float, world_size: int) -> float:
        return num_bytes

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        payloads = [bytes(operation.payload) for operation in operations]
        return [payloads] * len(payloads)

    @override
    def finish(self, backends: C10d) -> list[bytes]:
        mine = bytes_as_tensor(self.payload)
        backend = backends.backend_for(mine)
        # A backend gathers tensors of one length: first the lengths, then payloads with padding.
        lengths = torch.zeros(backends.world_size, dtype=torch.int64)
        lengths[backends.rank] = mine.numel()
        backends.wait(backend.allreduce([lengths], dist.AllreduceOptions()))
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = [torch.empty_like(padded) for _ in range(backends.world_size)]
        if padded.numel():
            backends.wait(backend.allgather([gathered], [padded]))
        return [
            tensor[:length].numpy().tobytes()
            for tensor, length in zip(gathered, lengths.tolist(), strict=True)
        ]


Operation: TypeAlias = Send | Recv | RecvAny | Post | Sleep | Now | DenseOperation

Collective: TypeAlias = Generator[Operation, Any, T]
"""A protocol in progress that will return a `T`."""


def perform(operation: Operation) -> Collective[Any]:
    """The protocol of one operation alone, whose result it returns."""
    return (yield operation)


def _parts_by_rank(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The part of each rank's tensor that is the rank's own."""
    return [tensor.chunk(len(tensors))[rank] for rank, tensor in enumerate(tensors)]


def bytes_as_tensor(payload: Payload) -> torch.Tensor:
    """A copy of the bytes, shape (len(payload),), uint8."""
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
