"""Sparse vectors as sorted pairs, and how they are added, merged and taken apart.

The same inputs give the same bytes on every machine. Values may include zeros (a sum can cancel);
zeros carry nothing, and `keep_largest` leaves them out of both its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.codec import sparse_kernels
from offbeat.codec.jit import bits_of, magnitude_mask
from offbeat.codec.memory import keep_freed_memory
from offbeat.errors import WireError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sparse:
    """A vector that is zero nearly everywhere.

    Attributes:
        indices: int64, shape (number of pairs,), strictly ascending, in [0, num_elements).
        values: float32 or float64, same shape.
        num_elements: length of the vector.
    """

    indices: NDArray[np.int64]
    values: NDArray[np.floating]
    num_elements: int

    def __len__(self) -> int:
        return self.indices.size

    @classmethod
    def empty(cls, num_elements: int, dtype: DTypeLike) -> Sparse:
        return cls(
            indices=np.empty(0, dtype=np.int64),
            values=np.empty(0, dtype=dtype),
            num_elements=num_elements,
        )

    @classmethod
    def from_dense(cls, dense: NDArray[np.floating]) -> Sparse:
        """The nonzeros of `dense`, shape (num_elements,).

        >>> Sparse.from_dense(np.array([0.0, 2.5, 0.0])).indices
        array([1])
        """
        indices = np.flatnonzero(dense)
        return cls(indices=indices, values=dense[indices], num_elements=dense.size)

    def to_dense(self) -> NDArray[np.floating]:
        dense = np.zeros(self.num_elements, dtype=self.values.dtype)
        dense[self.indices] = self.values
        return dense

    def scaled(self, factor: float) -> Sparse:
        return Sparse(
            indices=self.indices,
            values=self.values * self.values.dtype.type(factor),
            num_elements=self.num_elements,
        )


def add(a: Sparse, b: Sparse) -> Sparse:
    """The sum of two vectors of the same length and dtype."""
    if not len(a):
        return b
    if not len(b):
        return a
    total = _room_for(len(a) + len(b), a)
    return _pairs(
        *total, a, end=sparse_kernels.add_sorted(a.indices, a.values, b.indices, b.values, *total)
    )


def add_all(sparses: Sequence[Sparse]) -> Sparse:
    """The sum of at least one vector, added in pairs: the order depends on the number of vectors
    only.
    """
    while len(sparses) > 1:
        pairs = [add(a, b) for a, b in zip(sparses[::2], sparses[1::2], strict=False)]
        sparses = pairs + list(sparses[len(pairs) * 2 :])
    return sparses[0]


def keep_largest(sparse: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """The `k` pairs of largest magnitude, and the others.

    Among equal magnitudes those at lower indices are kept. Pairs with value zero are in neither
    result, so fewer than `k` may be kept.
    """
    k = min(k, len(sparse))
    mask, bits = magnitude_mask(sparse.values.dtype), bits_of(sparse.values)
    if 0 < k < len(sparse):
        kth = np.partition(bits & mask, bits.size - k)[bits.size - k]
    else:
        kth = mask ^ mask if k else mask  # below or above every magnitude
    indices, values = _room_for(len(sparse) + 1, sparse)
    num_kept, num_others = sparse_kernels.split_largest(
        sparse.indices, bits, mask, kth, k, indices, bits_of(values)
    )
    return _pairs(indices, values, sparse, end=num_kept), _pairs(
        indices, values, sparse, begin=k, end=k + num_others
    )


def merge(a: Sparse, b: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """The `k` largest of a + b, and what that leaves out: kept + dropped == a + b."""
    return keep_largest(add(a, b), k)


def split_by_index(sparse: Sparse, indices: NDArray[np.int64]) -> tuple[Sparse, Sparse]:
    """The pairs whose index is among the ascending `indices`, and the others."""
    inside, outside = _room_for(len(sparse), sparse), _room_for(len(sparse), sparse)
    num_inside, num_outside = sparse_kernels.split_common(
        sparse.indices, sparse.values, indices, *inside, *outside
    )
    return _pairs(*inside, sparse, end=num_inside), _pairs(*outside, sparse, end=num_outside)


def partition(sparse: Sparse, num_owners: int) -> list[Sparse]:
    """The pairs of each owner; `planning.fusion.owner_of` says who owns an index."""
    indices, values = _room_for(len(sparse), sparse)
    ends = np.empty(num_owners, dtype=np.int64)
    owners = np.empty(len(sparse), dtype=np.uint32)
    sparse_kernels.deal(sparse.indices, sparse.values, owners, ends, indices, values)
    bounds = [0, *ends.tolist()]
    return [
        _pairs(indices, values, sparse, begin=begin, end=end) for begin, end in pairwise(bounds)
    ]


def union_disjoint(parts: Sequence[Sparse]) -> Sparse:
    """One vector of at least one part. Raises `WireError` if two parts have an index in common."""
    union = add_all(parts)
    if len(union) != sum(map(len, parts)):
        raise WireError(
            "two ranks reported results for the same index; do all ranks run the same version with"
            " the same options?"
        )
    return union


def _room_for(num_pairs: int, like: Sparse) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    keep_freed_memory()
    return np.empty(num_pairs, dtype=np.int64), np.empty(num_pairs, dtype=like.values.dtype)


def _pairs(
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    like: Sparse,
    *,
    begin: SupportsIndex = 0,
    end: SupportsIndex,
) -> Sparse:
    return Sparse(
        indices=indices[begin:end], values=values[begin:end], num_elements=like.num_elements
    )
