"""How many entries of a distributed vector are of each magnitude, and what each owner of a part
keeps of the k largest.

Magnitudes are the leading 16 bits of |value| as float32: 8 of the mantissa, monotone in |value|.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel
from offbeat.codec.sparse import Sparse
from offbeat.errors import WireError

_HEAD = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
COUNTER_BYTES = 6
EXPECTED_COUNTERS = 128
"""Counters an owner reports, for estimates of cost. Measured with normal and log-normal gradients,
k = 25,000 and 4 to 32 ranks.
"""

MARGIN = 128
"""Entries by which an owner's share of the k largest may differ from half or twice the mean without
any effect.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many entries an owner has of each magnitude near the boundary.

    Attributes:
        magnitudes: uint16 array, descending.
        counts: uint32 array of the same shape.
    """

    magnitudes: NDArray[np.uint16]
    counts: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        return b"".join((_HEAD.pack(self.magnitudes.size), self.magnitudes.data, self.counts.data))

    @classmethod
    def from_bytes(cls, message: bytes | bytearray | memoryview) -> Histogram:
        """Inverse of `to_bytes`. Raises `WireError` when `message` is too short or too long."""
        if len(message) < _HEAD.size:
            raise WireError(f"a histogram message has only {len(message)} bytes")
        (size,) = _HEAD.unpack_from(message)
        if len(message) != _HEAD.size + size * COUNTER_BYTES:
            raise WireError(f"a histogram of {size} counters came in {len(message)} bytes")
        magnitudes = np.frombuffer(message, np.uint16, size, _HEAD.size)
        return cls(magnitudes, np.frombuffer(message, np.uint32, size, _HEAD.size + 2 * size))


def histogram(sparse: Sparse, k: int, world_size: int) -> Histogram:
    """Of the magnitudes around this owner's share of the `k` largest.

    Shares are close to k / world_size, so the boundary is near that place in the order of
    magnitudes. Entries well above it are counted with the largest magnitude reported, and entries
    well below it are left out: at most 2 k / world_size + `MARGIN` counters, and commonly one or
    two hundred.
    """
    share = k // world_size
    surely_kept, reported = max(0, share // 2 - MARGIN), min(k, 2 * share + MARGIN)
    return Histogram(*_count_magnitudes(sparse.values, surely_kept, reported))


def quotas(histograms: Sequence[Histogram], k: int) -> list[int]:
    """How many of its largest entries each owner keeps, so that the k largest of all are kept.

    Entries of the magnitude at the boundary are granted to the owners in turn, by rank. When there
    are fewer than `k` entries altogether, every owner keeps all it reported.
    """
    magnitudes = np.concatenate([h.magnitudes for h in histograms])
    counts = np.concatenate([h.counts for h in histograms]).astype(np.int64)
    owners = np.repeat(np.arange(len(histograms)), [h.counts.size for h in histograms])
    order = np.argsort(~magnitudes, kind="stable")  # from the largest on, and by owner
    counts, owners = counts[order], owners[order]
    granted = np.clip(k - (np.cumsum(counts) - counts), 0, counts)
    return [int(granted[owners == owner].sum()) for owner in range(len(histograms))]


@kernel
def _magnitude(value: np.floating) -> np.int64:
    """The leading 16 bits of |value| as float32."""
    return np.int64(np.float32(abs(value)).view(np.uint32)) >> 15


@kernel
def _count_magnitudes(
    values: NDArray[np.floating], surely_kept: int, reported: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Count the `reported` largest values by magnitude, descending.

    The `surely_kept` largest are counted with the next one, if there is one.
    """
    least, greatest = np.int64(0xFFFF), np.int64(0)
    for i in range(values.size):
        magnitude = _magnitude(values[i])
        least = magnitude if magnitude < least else least
        greatest = magnitude if magnitude > greatest else greatest
    counters = np.zeros(greatest - least + 1 if values.size else 0, dtype=np.uint32)
    for i in range(values.size):
        counters[np.uint64(_magnitude(values[i]) - least)] += np.uint32(1)
    magnitudes = np.empty(counters.size, dtype=np.uint16)
    counts = np.empty(counters.size, dtype=np.uint32)
    size = total = counted = 0
    first = surely_kept if values.size > surely_kept else 0
    for below in range(counters.size):
        if total >= reported:
            break
        total += counters[counters.size - 1 - below]
        if total > max(first, counted):
            magnitudes[size] = greatest - below
            counts[size] = min(total, reported) - counted
            counted = total
            size += 1
    return magnitudes[:size], counts[:size]
