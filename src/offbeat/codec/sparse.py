"""Sparse vectors as sorted pairs, and how they are added, merged and taken apart.

The same inputs give the same bytes on every machine. Values may include zeros (a sum can cancel); zeros carry nothing, and
`keep_largest` leaves them out of both its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.codec import kernels
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
        return cls(indices=np.empty(0, dtype=np.int64), values=np.empty(0, dtype=dtype), num_elements=num_elements)

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
        return Sparse(indices=self.indices, values=self.values * self.values.dtype.type(factor), num_elements=self.num_elements)

    def where(self, mask: NDArray[np.bool_]) -> Sparse:
        """The pairs at which `mask`, shape (number of pairs,), is true."""
        places = np.flatnonzero(mask)  # many times faster than indexing by a mask without pattern
        return Sparse(indices=self.indices[places], values=self.values[places], num_elements=self.num_elements)


def add(a: Sparse, b: Sparse) -> Sparse:
    """The sum of two vectors of the same length and dtype."""
    if not len(a):
        return b
    if not len(b):
        return a
    indices = np.empty(len(a) + len(b), dtype=np.int64)
    values = np.empty(indices.size, dtype=a.values.dtype)
    count = kernels.add_sorted(a.indices, a.values, b.indices, b.values, indices, values)
    return Sparse(indices=indices[:count], values=values[:count], num_elements=a.num_elements)


def add_all(sparses: Sequence[Sparse]) -> Sparse:
    """The sum of at least one vector, added in pairs: the order depends on the number of vectors only."""
    while len(sparses) > 1:
        pairs = [add(a, b) for a, b in zip(sparses[::2], sparses[1::2], strict=False)]
        sparses = pairs + list(sparses[len(pairs) * 2 :])
    return sparses[0]


def keep_largest(sparse: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """The `k` pairs of largest magnitude, and the others.

    Among equal magnitudes those at lower indices are kept. Pairs with value zero are in neither result, so fewer than `k`
    may be kept.
    """
    nonzero = sparse.values != 0
    if not nonzero.all():
        sparse = sparse.where(nonzero)
    kept = np.full(len(sparse), k > 0)
    if 0 < k < len(sparse):
        mask = kernels.magnitude_mask(sparse.values.dtype)
        bits = kernels.bits_of(sparse.values)
        kth = np.partition(bits & mask, bits.size - k)[bits.size - k]
        kernels.take_largest(bits, mask, kth, k, kept)
    return sparse.where(kept), sparse.where(~kept)


def merge(a: Sparse, b: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """The `k` largest of a + b, and what that leaves out: kept + dropped == a + b."""
    return keep_largest(add(a, b), k)


def split_by_index(sparse: Sparse, indices: NDArray[np.int64]) -> tuple[Sparse, Sparse]:
    """The pairs whose index is among the ascending `indices`, and the others."""
    inside = np.empty(len(sparse), dtype=np.bool_)
    kernels.mark_common(sparse.indices, indices, inside)
    return sparse.where(inside), sparse.where(~inside)


def partition(sparse: Sparse, owners: NDArray[np.integer], num_owners: int) -> list[Sparse]:
    """The pairs of each owner. `owners`: shape (number of pairs,), in [0, num_owners)."""
    narrow = owners.astype(np.uint16 if num_owners <= 1 << 16 else np.int64)  # numpy sorts 16 bits by radix
    order = np.argsort(narrow, kind="stable")
    bounds = np.searchsorted(narrow[order], np.arange(1, num_owners, dtype=narrow.dtype))
    indices, values = np.split(sparse.indices[order], bounds), np.split(sparse.values[order], bounds)
    return [Sparse(indices=i, values=v, num_elements=sparse.num_elements) for i, v in zip(indices, values, strict=True)]


def union_disjoint(parts: Sequence[Sparse]) -> Sparse:
    """One vector of at least one part. Raises `WireError` if two parts have an index in common."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")  # finds the ascending runs and merges them
    indices = indices[order]
    if (indices[1:] == indices[:-1]).any():
        raise WireError(
            "two ranks reported results for the same index; do all ranks run the same version with the same options?"
        )
    values = np.concatenate([part.values for part in parts])[order]
    return Sparse(indices=indices, values=values, num_elements=parts[0].num_elements)
