"""The weighted mean of vectors, over messages between two ranks: the same bits on every rank.

1. The vector is cut into one region a rank. Every rank with a weight sends each owner its part of
   the owner's region.
2. The owner adds up the parts, each times its weight divided by the sum of the weights, in the
   order of the ranks.
3. It sends the mean of its region to all peers.

Cost: 2(P-1) messages, 2(P-1)/P n elements sent by each rank; two messages in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import torch

from offbeat.codec.model_wire import Values
from offbeat.codec.weightless import WeightlessVector
from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Payload, Recv, Send


def weighted_mean(
    rank: int,
    weights: Sequence[float],
    values: Values | None,
    *,
    num_elements: int,
    dtype: np.dtype[np.floating],
) -> Collective[Values]:
    """sum of w_i x_i / sum of w_i.

    Args:
        rank: this rank.
        weights: of each rank, >= 0, not all zero; the same on all ranks.
        values: this rank's, shape (num_elements,); not read, and may be None, where its weight is
            0. They must not change before all ranks have the result. In a simulation a tensor
            without content, on all ranks.
        num_elements: the same on all ranks.
        dtype: of all values, float32 or float64.

    Returns:
        A vector of its own, shape (num_elements,).

    Raises:
        WireError: a rank sent another number of bytes.
    """
    size, total = len(weights), sum(weights)
    assert total > 0, "at least one rank needs a weight"
    bounds = [num_elements * owner // size for owner in range(size + 1)]
    regions = [slice(begin, end) for begin, end in pairwise(bounds)]
    # Each rank begins with its successor, so that not all send to the same receiver at once.
    peers = [(rank + hop) % size for hop in range(1, size)]
    if weights[rank]:
        assert values is not None
        for peer in peers:
            yield Send(peer, _bytes_of(values[regions[peer]], num_elements))
    if isinstance(values, torch.Tensor):
        own, result = values[regions[rank]], values
    else:
        own = np.zeros(bounds[rank + 1] - bounds[rank], dtype)
        result = np.empty(num_elements, dtype)
    # In the order of the ranks, not of arrival, since floating-point sums depend on it.
    for sender in (sender for sender, weight in enumerate(weights) if weight):
        if sender == rank:
            assert values is not None
            part = values[regions[rank]]
        else:
            part = _read((yield Recv(sender)), dtype, own.size, sender)
        own += part * dtype.type(weights[sender] / total)
    result[regions[rank]] = own
    for peer in peers:
        yield Send(peer, _bytes_of(own, num_elements))
    for peer in peers:
        result[regions[peer]] = _read(
            (yield Recv(peer)), dtype, bounds[peer + 1] - bounds[peer], peer
        )
    return result


def _bytes_of(values: Values, num_elements: int) -> memoryview:
    """As they travel: those of a vector of so many."""
    if isinstance(values, torch.Tensor):
        whole = num_elements * values.itemsize
        return cast(memoryview, WeightlessVector(values.nbytes, values, whole))
    return values.view(np.uint8).data


def _read(payload: Payload, dtype: np.dtype[np.floating], count: int, sender: int) -> Values:
    if isinstance(payload, WeightlessVector):
        return cast(Values, payload.content)
    num_bytes = memoryview(payload).nbytes
    if num_bytes != count * dtype.itemsize:
        raise WireError(
            f"rank {sender} sent {num_bytes} bytes of a mean, expected were {count} numbers of"
            f" {dtype}; do all ranks train the same model?"
        )
    return np.frombuffer(payload, dtype)
