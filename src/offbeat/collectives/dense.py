"""Dense all-reduce: the driver's own collective.

Cost per step (ring): 2(P-1) messages, 2(P-1)/P n elements sent by each rank.
"""

from __future__ import annotations

import torch

from offbeat.planning.costs import Network
from offbeat.transport.operations import AllReduce, Collective


def dense_all_reduce(tensor: torch.Tensor, tail: torch.Tensor | None = None) -> Collective[None]:
    """Sum `tensor` over all ranks, in place; then `tail`, for what may not be summed in the tensor's own precision."""
    yield AllReduce(tensor)
    if tail is not None:
        yield AllReduce(tail)


def cost_s(*, world_size: int, num_elements: int, k: int, pair_bytes: int, network: Network) -> float:
    """2(P-1) alpha + 2(P-1)/P n beta, with 4-byte elements; `k` and `pair_bytes` do not matter."""
    hops = 2 * (world_size - 1)
    return network.dense.time_s(num_messages=hops, num_bytes=hops / world_size * 4 * num_elements)
