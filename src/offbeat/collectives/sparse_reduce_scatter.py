"""Sparse reduce-scatter and all-gather: the global top-k with O(k) traffic, for any world size.

    deal the indices out to owners in small blocks                  (planning.fusion.owner_of)
    send every owner its part of my entries; an owner adds up what it gets
    all-gather how many sums each owner has of each magnitude       (a few hundred counters)
    all ranks read off the magnitude that leaves k entries
    each owner keeps its sums above it and owes the rest
    all-gather what was kept

Owners see every contribution to their indices, so the sums are exact, and what is dropped is dropped once, by one rank.
Magnitudes are compared by their leading 16 bits (8 of the mantissa), so the result is the exact top-k up to a relative
2**-8 in magnitude at the boundary: an entry that is left out is at most that much larger than the smallest one kept. That
holds while each owner's share of the top-k lies within half and twice the mean, give or take `MARGIN` entries; an owner
beyond that keeps a few entries too many or too few.

After Ok-Topk (Li and Hoefler, PPoPP 2022) and SparDL (arXiv 2304.00737). Differences: owners are dealt blocks in turn where
Ok-Topk re-balances regions by consensus; the threshold is agreed on in each step where Ok-Topk re-uses it; nothing is
re-sparsified on the way, as SparDL does.

Cost per step: P-1 + 2 ceil(log2 P) messages in sequence; 2 (P-1)/P k pairs sent by each rank, and (P-1) c counters of 6 bytes,
where c is at most 2 k / P + 128 and commonly one or two hundred.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.sparse import Sparse, add, keep_largest, partition, union_disjoint
from offbeat.codec.tally import Tally
from offbeat.collectives.base import Exchanged, Wire
from offbeat.collectives.gather import all_gather
from offbeat.errors import WireError
from offbeat.planning.costs import Network
from offbeat.planning.fusion import owner_of
from offbeat.planning.trees import num_rounds
from offbeat.transport.operations import Collective, Payload, Recv, Send

_HEAD = struct.Struct("<I")
COUNTER_BYTES = 6
MARGIN = 128
"""Entries by which an owner's share of the k largest may differ from half or twice the mean without any effect."""

EXPECTED_COUNTERS = 128
"""Counters an owner reports, for the cost. Measured with normal and log-normal gradients, k = 25,000 and 4 to 32 ranks."""


def sparse_reduce_scatter(rank: int, world_size: int, mine: Sparse, tally: Tally, k: int, wire: Wire) -> Collective[Exchanged]:
    """At most k entries of the exact sum: its k largest, up to a relative 2**-8 in magnitude."""
    parts = partition(mine, owner_of(mine.indices, world_size), world_size)
    owed, sums = wire.empty(), parts[rank]
    for distance in range(1, world_size):
        owner = (rank + distance) % world_size
        payload, rounding = wire.encode(parts[owner], tally)
        owed = add(owed, rounding)
        yield Send(owner, payload)
    for distance in range(1, world_size):
        theirs, _ = wire.decode((yield Recv((rank - distance) % world_size)))
        sums = add(sums, theirs)

    messages = yield from all_gather(rank, world_size, _pack(histogram(sums, k, world_size)))
    kept, dropped = keep_largest(sums, quotas([_unpack(message) for message in messages], k)[rank])
    payload, rounding = wire.encode(kept, tally)
    owed = add(add(owed, dropped), rounding)

    # Tallies are merged here, in the order of ranks: sums of weights depend on the order, and all ranks must get the same.
    messages = yield from all_gather(rank, world_size, payload)
    regions, tallies = zip(*(wire.decode(message) for message in messages), strict=True)
    return Exchanged(kept=union_disjoint(regions), owed=owed, tally=reduce(Tally.merge, tallies))


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many entries an owner has of each magnitude near the boundary.

    Attributes:
        magnitudes: uint16 array, descending: the leading bits of |value| as float32, monotone in |value|.
        counts: int64 array of the same shape.
    """

    magnitudes: NDArray[np.uint16]
    counts: NDArray[np.int64]


def histogram(sparse: Sparse, k: int, world_size: int) -> Histogram:
    """Of the magnitudes around this owner's share of the `k` largest.

    Shares are close to k / world_size, so the boundary lies near that rank. Entries that rank well above it are counted with
    the largest magnitude reported, entries well below it are left out: at most 2 k / world_size + `MARGIN` counters, and
    commonly one or two hundred.
    """
    keys = np.sort((np.abs(sparse.values).astype(np.float32).view(np.uint32) >> 15).astype(np.uint16))[::-1]
    share = k // world_size
    surely_kept, reported = max(0, share // 2 - MARGIN), min(k, 2 * share + MARGIN)
    keys = np.minimum(keys[:reported], keys[surely_kept : surely_kept + 1]) if len(keys) > surely_kept else keys
    magnitudes, counts = np.unique(keys, return_counts=True)
    return Histogram(magnitudes[::-1], counts[::-1].astype(np.int64))


def quotas(histograms: Sequence[Histogram], k: int) -> list[int]:
    """How many of its largest entries each owner keeps, so that the k largest of all are kept.

    Entries of the magnitude at the boundary are granted to the owners in turn, by rank. When there are fewer than `k`
    entries altogether, every owner keeps all it reported.
    """
    magnitudes = np.unique(np.concatenate([h.magnitudes for h in histograms]))[::-1]
    counts = np.zeros((len(histograms), magnitudes.size), dtype=np.int64)
    for row, h in zip(counts, histograms, strict=True):
        row[np.searchsorted(-magnitudes.astype(np.int64), -h.magnitudes.astype(np.int64))] = h.counts
    boundary = int(np.searchsorted(np.cumsum(counts.sum(axis=0)), k))
    keeps: list[int] = counts[:, :boundary].sum(axis=1).tolist()
    if boundary < magnitudes.size:
        left = k - sum(keeps)
        for owner, at_boundary in enumerate(counts[:, boundary].tolist()):
            granted = min(at_boundary, left)
            keeps[owner] += granted
            left -= granted
    return keeps


def _pack(h: Histogram) -> bytes:
    return _HEAD.pack(h.magnitudes.size) + h.magnitudes.astype("<u2").tobytes() + h.counts.astype("<u4").tobytes()


def _unpack(message: Payload) -> Histogram:
    if len(message) < _HEAD.size:
        raise WireError(f"a histogram message has only {len(message)} bytes")
    (size,) = _HEAD.unpack_from(message)
    if len(message) != _HEAD.size + size * COUNTER_BYTES:
        raise WireError(f"a histogram of {size} counters came in {len(message)} bytes")
    magnitudes = np.frombuffer(message, "<u2", size, _HEAD.size)
    return Histogram(magnitudes, np.frombuffer(message, "<u4", size, _HEAD.size + 2 * size).astype(np.int64))


def cost_s(*, world_size: int, k: int, pair_bytes: int, network: Network) -> float:
    """(P-1 + 2 log2 P) alpha + (2 (P-1)/P k pairs + (P-1) c counters) beta."""
    num_bytes = 2 * (world_size - 1) / world_size * k * pair_bytes + (world_size - 1) * EXPECTED_COUNTERS * COUNTER_BYTES
    messages = world_size - 1 + 2 * num_rounds(world_size)
    return network.messages.time_s(num_messages=messages, num_bytes=num_bytes)
