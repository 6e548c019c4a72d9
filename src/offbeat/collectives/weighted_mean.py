"""The weighted mean of vectors, over messages between two ranks: the same bits on every rank.

1. The vector is cut into one region a rank. Every rank with a weight sends each owner its part of
   the owner's region.
2. The owner adds up the parts, each times its weight divided by the sum of the weights, in the
   order of the ranks.
3. It sends the mean of its region to all peers.

A long vector goes through this a few MiB at a time, and more with many ranks, whose parts would be
small: while the means of one fragment are under way, the parts of the next one are. So no more of
it is in memory than two fragments, besides what the caller keeps.

Cost: for each fragment 2(P-1) messages, none of them empty, together 2(P-1)/P n elements sent by
each rank; two messages in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Protocol, cast

import numpy as np
import torch

from offbeat.codec.model_wire import Values
from offbeat.codec.weightless import WeightlessVector
from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Payload, Recv, Send

FRAGMENT_BYTES: Final = 4 << 20

PART_BYTES: Final = 32 << 10
"""The least of a message, but in the last fragment: a shorter one takes a rank about as long, and a
fragment takes as many as there are ranks.
"""


class Elements(Protocol):
    """A vector that is read and written a few elements at a time, as an array is."""

    def __getitem__(self, span: slice, /) -> Values: ...

    def __setitem__(self, span: slice, values: Values, /) -> None: ...


def weighted_mean(
    rank: int,
    weights: Sequence[float],
    values: Elements | None,
    *,
    num_elements: int,
    dtype: np.dtype[np.floating],
    into: Elements | None = None,
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
        into: where the result is written, shape (num_elements,); None: into a vector of its own.

    Returns:
        Where the result is; `values` in a simulation.

    Raises:
        WireError: a rank sent another number of bytes.
    """
    size, total = len(weights), sum(weights)
    assert total > 0, "at least one rank needs a weight"
    # Sizes alone need no memory.
    is_weightless = isinstance(values, torch.Tensor)
    fragment_bytes = max(FRAGMENT_BYTES, size * PART_BYTES)
    step = max(1, num_elements if is_weightless else fragment_bytes // dtype.itemsize)
    fragments = [
        regions_of(begin, min(begin + step, num_elements), size)
        for begin in range(0, num_elements, step)
    ]
    if is_weightless:
        into = values
    result: Elements = np.empty(num_elements, dtype) if into is None else into
    # Each rank begins with its successor, so that not all send to the same receiver at once.
    peers = [(rank + hop) % size for hop in range(1, size)]
    # Peers receive in the order in which this sends.
    for coming, here, gone in zip(
        [*fragments, None, None], [None, *fragments, None], [None, None, *fragments], strict=True
    ):
        # Of fewer elements than ranks some ranks own none, and nobody sends them anything.
        if coming is not None and weights[rank]:
            assert values is not None
            for peer in peers:
                if _length(coming[peer]):
                    yield Send(peer, _bytes_of(values[coming[peer]], num_elements))
        if here is not None and _length(here[rank]):
            mean = yield from _mean_of_region(rank, weights, values, here[rank], dtype)
            result[here[rank]] = mean
            for peer in peers:
                yield Send(peer, _bytes_of(mean, num_elements))
        if gone is not None:
            for peer in peers:
                if count := _length(gone[peer]):
                    result[gone[peer]] = _read((yield Recv(peer)), dtype, count, peer)
    return cast(Values, result)


def regions_of(begin: int, end: int, size: int) -> list[slice]:
    """The elements `begin` to `end` in as many parts of about equal length."""
    bounds = [begin + (end - begin) * owner // size for owner in range(size + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _mean_of_region(
    rank: int,
    weights: Sequence[float],
    values: Elements | None,
    region: slice,
    dtype: np.dtype[np.floating],
) -> Collective[Values]:
    """What the peers have sent of `region`, and this rank's own, added up."""
    total = sum(weights)
    own = values[region] if isinstance(values, torch.Tensor) else np.zeros(_length(region), dtype)
    # In the order of the ranks, not of arrival, since floating-point sums depend on it.
    for sender in (sender for sender, weight in enumerate(weights) if weight):
        if sender == rank:
            assert values is not None
            part = values[region]
        else:
            part = _read((yield Recv(sender)), dtype, _length(region), sender)
        own += part * dtype.type(weights[sender] / total)
    return own


def _length(region: slice) -> int:
    return int(region.stop - region.start)


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
