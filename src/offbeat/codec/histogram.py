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

from offbeat.codec import sparse_kernels
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
    return Histogram(*sparse_kernels.count_magnitudes(sparse.values, surely_kept, reported))


def quotas(histograms: Sequence[Histogram], k: int) -> list[int]:
    """How many of its largest entries each owner keeps, so that the k largest of all are kept.

    Entries of the magnitude at the boundary are granted to the owners in turn, by rank. When there
    are fewer than `k` entries altogether, every owner keeps all it reported.
    """
    magnitudes = np.concatenate([h.magnitudes for h in histograms])
    counts = np.concatenate([h.counts for h in histograms])
    ends = np.cumsum([h.counts.size for h in histograms])
    granted: list[int] = sparse_kernels.grant(magnitudes, counts, ends, k).tolist()
    return granted
