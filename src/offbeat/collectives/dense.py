"""Collectives of one dense operation each: all-reduce and its halves, broadcast, and a gathering of
plain values.

Cost per step of an all-reduce (ring): 2(P-1) messages, 2(P-1)/P n elements sent by each rank; each
of its halves takes half of them.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.errors import WireError
from offbeat.transport.operations import (
    AllGather,
    AllGatherTensor,
    AllReduceTensor,
    Broadcast,
    Collective,
    Payload,
    ReduceScatterTensor,
    perform,
)


def dense_all_reduce(tensor: torch.Tensor) -> Collective[torch.Tensor]:
    """Sum `tensor` over all ranks, in place."""
    return perform(AllReduceTensor(tensor))


def dense_reduce_scatter(tensor: torch.Tensor) -> Collective[torch.Tensor]:
    """Sum this rank's part of `tensor` over all ranks, in place; the rest is of no worth then."""
    return perform(ReduceScatterTensor(tensor))


def dense_all_gather(tensor: torch.Tensor) -> Collective[torch.Tensor]:
    """Bring every rank's part of `tensor` to all ranks, in place."""
    return perform(AllGatherTensor(tensor))


def dense_broadcast(tensor: torch.Tensor, root: int) -> Collective[torch.Tensor]:
    """Replace `tensor` by rank `root`'s, in place."""
    return perform(Broadcast(tensor, root))


def gather_bytes(payload: bytes) -> Collective[list[Payload]]:
    """Every rank's `payload`, by rank."""
    return perform(AllGather(payload))


def gather_values(value: Any) -> Collective[list[Any]]:
    """Every rank's `value`, of JSON's kinds, by rank: to agree on something, not to train. Raises
    `WireError` for what is no JSON.
    """
    payloads = yield from gather_bytes(json.dumps(value).encode())
    values = []
    for rank, payload in enumerate(payloads):
        try:
            values.append(json.loads(bytes(payload)))
        except (ValueError, RecursionError) as error:
            raise WireError(
                f"rank {rank} sent {bytes(payload[:80])!r} where JSON was due; do all ranks run the"
                " same offbeat?"
            ) from error
    return values


def cost_s(*, world_size: int, num_bytes: int, network: NetworkCosts) -> float:
    """2(P-1) alpha + 2(P-1)/P m beta, for a tensor of m = `num_bytes`."""
    hops = 2 * (world_size - 1)
    return network.dense.time_s(num_messages=hops, num_bytes=hops / world_size * num_bytes)
