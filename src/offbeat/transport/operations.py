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

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")

Payload: TypeAlias = bytes | bytearray | memoryview
"""Bytes of one message. Whoever sends them must not change them afterwards."""


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `payload` over for delivery to rank `peer`; goes on at once. Result: None."""

    peer: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for the next message from rank `peer` on this channel. Result: its payload (`bytes` or
    `memoryview`).

    With `timeout_s`, raises `PeerTimeoutError` into the collective once that long has passed; the
    message is not lost and a later `Recv` may take it.
    """

    peer: int
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class RecvAny:
    """Wait for the next message on this channel from any of `peers`. Result: a pair (rank,
    payload).

    A rank that names itself among `peers` also waits for what it posts to itself, so one receive
    can wait for the network and for another thread. Raises, into the collective, `PeerError` naming
    a rank of `peers` that is dead or has left once
    nothing is there to be taken, whether or not others still may send: leave it out and go on.
    Raises `PeerTimeoutError` as
    `Recv` does. No one else may receive on this channel with `Recv`.
    """

    peers: frozenset[int]
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Leave `payload` for this rank's own `RecvAny` on this channel: an event, not traffic. Result:
    None.
    """

    payload: Payload


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Replace `tensor` (contiguous, any numeric dtype) by its sum over all ranks, in place. Result:
    the tensor.
    """

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Replace `tensor` (contiguous) by rank `root`'s, in place. Result: the tensor."""

    tensor: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True)
class AllGather:
    """Give `payload` to every rank. Result: a list of every rank's payload, by rank. Lengths may
    differ.

    For control (comparing configurations, agreeing on a plan), where the driver's own dense
    collective serves. Sparse collectives use `collectives.gather`, which is made of `Send` and
    `Recv`.
    """

    payload: Payload


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let `seconds` pass. Result: None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Now:
    """Result: the driver's monotonic clock, in seconds (virtual under the virtual driver)."""


Operation: TypeAlias = (
    Send | Recv | RecvAny | Post | AllReduce | Broadcast | AllGather | Sleep | Now
)

Collective: TypeAlias = Generator[Operation, Any, T]
"""A protocol in progress that will return a `T`."""
