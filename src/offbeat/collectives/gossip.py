"""Averaging with a few ranks at a time: over the edges of an undirected graph, and push-sum over
those of a directed one.

A vector travels as the raw bytes of its blocks, in messages of at most `MESSAGE_BYTES`, so that the
wire stays full while blocks are read. Both sides know the blocks' types and lengths.

Cost of a round, for n bytes and d peers: d n bytes and d ceil(n / MESSAGE_BYTES) messages sent by
each rank.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.arithmetic.topologies import GossipPeers
from offbeat.codec.arithmetic import Message
from offbeat.codec.weightless import WeightlessVector
from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Recv, Send

MESSAGE_BYTES = 8 << 20

Block: TypeAlias = NDArray[np.floating]
"""Part of a vector, of one type, shape (n,). In a simulation a tensor without content."""

_WEIGHT = struct.Struct("<d")


def neighbour_mean(
    rank: int, mine: Sequence[Block], weights: Mapping[int, float]
) -> Collective[list[Block]]:
    """The weighted mean of this rank's vector and its neighbours': sum_j W_ij x_j / sum_j W_ij.

    Args:
        rank: this rank.
        mine: its vector, which is left as it is.
        weights: the weight of each rank to average with, `rank` included. Whoever is in here has
            `rank` in its own.
    """
    message = _join(b"", mine)
    neighbours = [peer for peer in weights if peer != rank]
    for peer in neighbours:
        yield from _send(peer, message)
    total = [block * weights[rank] for block in mine]
    for peer in neighbours:
        theirs = _blocks_of((yield from _receive(peer, len(message))), mine)
        for block, other in zip(total, theirs, strict=True):
            block += other * weights[peer]
    if (divisor := sum(weights.values())) != 1:
        for block in total:
            block /= divisor
    return total


def swap(
    told: Sequence[tuple[int, Sequence[Message]]], heard: Mapping[str, int], num_messages: int
) -> Collective[dict[str, list[Message]]]:
    """Send messages to some ranks, and receive as many from each of some.

    Args:
        told: whom to send to, and what.
        heard: whom to receive from, by what the messages are called in the result.
        num_messages: of each.
    """
    for peer, messages in told:
        for message in messages:
            yield Send(peer, message)
    theirs: dict[str, list[Message]] = {}
    for name, peer in heard.items():
        theirs[name] = []
        for _ in range(num_messages):
            theirs[name].append((yield Recv(peer)))
    return theirs


def push_sum(
    peers: GossipPeers, mine: Sequence[Block], weight: float
) -> Collective[tuple[list[Block], float]]:
    """One round of push-sum: this rank parts with equal shares of its vector and its weight, and
    adds what it is sent.

    Column-stochastic whatever the graph: a rank keeps what it did not send, which is not quite an
    equal share where shares were rounded. So the sums over all ranks of vectors and of weights stay
    what they are.

    Args:
        peers: whom this rank sends to and hears from; each target has this rank among its sources.
        mine: the numerators x, which are left as they are.
        weight: the denominator w > 0. The mean that a rank knows is x / w.
    """
    message, total, weight = _part_with_shares(mine, weight, len(peers.targets))
    for peer in peers.targets:
        yield from _send(peer, message)
    for peer in peers.sources:
        theirs = yield from _receive(peer, len(message))
        head, values = theirs[: _WEIGHT.size], theirs[_WEIGHT.size :]
        weight += _WEIGHT.unpack_from(getattr(head, "content", head))[0]
        for block, other in zip(total, _blocks_of(values, mine), strict=True):
            block += other
    return total, weight


def _part_with_shares(
    mine: Sequence[Block], weight: float, num_targets: int
) -> tuple[memoryview, list[Block], float]:
    """The message that takes one share along; what is left of the vector, and of the weight, when
    all targets have theirs.
    """
    share = 1 / (1 + num_targets)
    parting = [block * share for block in mine]
    kept = [part * -num_targets for part in parting]
    for block, whole in zip(kept, mine, strict=True):
        block += whole
    return _join(_WEIGHT.pack(weight * share), parting), kept, weight - weight * share * num_targets


def _join(head: bytes, blocks: Sequence[Block]) -> memoryview:
    if any(isinstance(block, torch.Tensor) for block in blocks):
        num_bytes = len(head) + sum(block.nbytes for block in blocks)
        return cast(memoryview, WeightlessVector(num_bytes, head, num_bytes))
    return memoryview(b"".join([head, *(block.data.cast("B") for block in blocks if block.size)]))


def _send(peer: int, message: memoryview) -> Collective[None]:
    for begin in range(0, len(message), MESSAGE_BYTES):
        yield Send(peer, message[begin : begin + MESSAGE_BYTES])


def _receive(peer: int, num_bytes: int) -> Collective[memoryview]:
    pieces = []
    for begin in range(0, num_bytes, MESSAGE_BYTES):
        piece = yield Recv(peer)
        if len(piece) != (expected := min(MESSAGE_BYTES, num_bytes - begin)):
            raise WireError(
                f"rank {peer} sent {len(piece)} bytes of its weights where {expected} were due; do"
                " all ranks train the same model?"
            )
        pieces.append(piece)
    if pieces and isinstance(pieces[0], WeightlessVector):
        return cast(memoryview, WeightlessVector(num_bytes, pieces[0].content, num_bytes))
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _blocks_of(message: memoryview, like: Sequence[Block]) -> list[Block]:
    """The blocks in `message`, of the types and lengths of `like`."""
    if isinstance(message, WeightlessVector) or not len(message):
        return list(like)  # of nothing they are alike
    blocks, begin = [], 0
    for block in like:
        blocks.append(np.frombuffer(message, dtype=block.dtype, count=block.size, offset=begin))
        begin += block.nbytes
    return blocks
