"""Sparse vectors as sorted pairs, and how they are added, merged and taken apart.

The same inputs give the same bytes on every machine. Values may include zeros (a sum can cancel);
zeros carry nothing, and `keep_largest` leaves them out of both its results.

Magnitudes are ordered by their bits: for IEEE numbers without the sign bit, integer order is the
order of magnitude, infinities above all finite numbers and NaNs above those. So nothing is lost
even among values that are not numbers.

In the kernels, which walk along sorted pairs, what an entry's fate depends on is as good as random,
so loops select and count instead of branching: a branch that cannot be predicted costs more than
everything else that is done for an entry. Positions are unsigned, which spares the test for
Python's negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from offbeat.codec.device_copies import on_device
from offbeat.codec.jit import keep_freed_memory, kernel
from offbeat.errors import WireError

_ONE = np.uint64(1)

OWNER_BLOCK = 64
"""Consecutive indices that belong to the same owner."""

_Pairs: TypeAlias = tuple[NDArray[np.int64], NDArray[np.floating]]
"""Indices and values, of the same shape, as the kernels take them."""


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

    def __getitem__(self, which: slice | NDArray[np.generic]) -> Sparse:
        """Some of the pairs, by their places or by a mask; a slice copies nothing."""
        return replace(self, indices=self.indices[which], values=self.values[which])

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
        return replace(self, values=self.values * self.values.dtype.type(factor))


def add(a: Sparse, b: Sparse) -> Sparse:
    """The sum of two vectors of the same length and dtype."""
    if not len(a):
        return b
    if not len(b):
        return a
    total = _room_for(len(a) + len(b), a)
    return total[: _add_sorted(_pairs(a), _pairs(b), _pairs(total))]


def add_all(sparses: Sequence[Sparse]) -> Sparse:
    """The sum of at least one vector, added in pairs: the order depends on the number of vectors
    only.
    """
    while len(sparses) > 1:
        pairs = [add(a, b) for a, b in zip(sparses[::2], sparses[1::2], strict=False)]
        sparses = pairs + list(sparses[len(pairs) * 2 :])
    return sparses[0]


def clip_to_median(sparses: Sequence[Sparse]) -> list[Sparse]:
    """At least one vector, those that are longer than the median shortened to it. Zeros do not
    count: ranks that have ended, or are new, would clip all others to nothing.
    """
    # One after the other in double precision, so that every machine finds the same bits.
    squares = [np.cumsum(np.square(each.values, dtype=np.float64)) for each in sparses]
    norms = np.sqrt([sums[-1] if sums.size else 0.0 for sums in squares])
    median = float(np.median(norms[norms > 0])) if norms.any() else 0.0
    return [
        each.scaled(median / norm) if norm > median else each
        for each, norm in zip(sparses, norms.tolist(), strict=True)
    ]


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
    split = _room_for(len(sparse) + 1, sparse)
    num_kept, num_others = _split_largest(
        sparse.indices, bits, mask, kth, k, split.indices, bits_of(split.values)
    )
    return split[:num_kept], split[k : k + num_others]


def split_common(sparse: Sparse, other: Sparse) -> tuple[Sparse, Sparse]:
    """The pairs of `sparse` whose index is in `other` too, and its others."""
    inside, outside = _room_for(len(sparse), sparse), _room_for(len(sparse), sparse)
    num_inside, num_outside = _split_common(
        _pairs(sparse), other.indices, _pairs(inside), _pairs(outside)
    )
    return inside[:num_inside], outside[:num_outside]


def partition(sparse: Sparse, num_owners: int) -> list[Sparse]:
    """The pairs of each owner."""
    owners = owner_of(sparse.indices, num_owners)
    # Numbers of 1 or 2 bytes are sorted in one pass for each byte.
    order = np.argsort(owners.astype(np.min_scalar_type(num_owners)), kind="stable")
    dealt = sparse[order]
    bounds = [0, *np.cumsum(np.bincount(owners, minlength=num_owners)).tolist()]
    return [dealt[begin:end] for begin, end in pairwise(bounds)]


def owner_of(indices: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """Which rank sums the entries at `indices`: blocks of `OWNER_BLOCK` indices are dealt out in
    turn.

    Gradients are large in some layers and small in others; dealing out small blocks gives every
    rank its share of each layer, where equal ranges would give one rank nearly everything.
    """
    return (indices // OWNER_BLOCK) % world_size


def union_disjoint(parts: Sequence[Sparse]) -> Sparse:
    """One vector of at least one part. Raises `WireError` if two parts have an index in common."""
    union = add_all(parts)
    if len(union) != sum(map(len, parts)):
        raise WireError(
            "two ranks reported results for the same index; do all ranks run the same version with"
            " the same options?"
        )
    return union


def add_owed(flat: torch.Tensor, owed: Sparse) -> None:
    """Add `owed` into `flat`, shape (owed.num_elements,), in place."""
    flat.index_add_(
        0,
        on_device(torch.from_numpy(owed.indices), flat.device),
        on_device(torch.from_numpy(owed.values).to(flat.dtype), flat.device),
    )


def _room_for(num_pairs: int, like: Sparse) -> Sparse:
    keep_freed_memory()
    values = np.empty(num_pairs, dtype=like.values.dtype)
    return replace(like, indices=np.empty(num_pairs, dtype=np.int64), values=values)


def _pairs(sparse: Sparse) -> _Pairs:
    return sparse.indices, sparse.values


def bits_of(values: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """The same memory as unsigned integers of the same width, sign bit included."""
    return values.view(f"u{values.itemsize}")


@cache
def magnitude_mask(dtype: np.dtype[np.generic]) -> np.unsignedinteger:
    """All bits of a number of `dtype` but the sign, which is the topmost; as an unsigned integer of
    the same width.
    """
    unsigned = np.dtype(f"u{dtype.itemsize}")
    mask: np.unsignedinteger = unsigned.type((1 << 8 * dtype.itemsize - 1) - 1)
    return mask


@kernel
def _add_next(
    first: _Pairs, second: _Pairs, total: _Pairs, a: np.uint64, b: np.uint64, count: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """One step of the merge: writes the next pair, returns the positions after it."""
    index_a, index_b, value_a, value_b = first[0][a], second[0][b], first[1][a], second[1][b]
    takes_a, takes_b = index_a <= index_b, index_b <= index_a
    zero = total[1].dtype.type(0)
    total[0][count] = min(index_a, index_b)
    total[1][count] = (value_a if takes_a else zero) + (value_b if takes_b else zero)
    return a + np.uint64(takes_a), b + np.uint64(takes_b), count + _ONE


@kernel
def _copy(
    source: _Pairs, begin: np.uint64, end: np.uint64, target: _Pairs, count: np.uint64
) -> np.uint64:
    """Copies pairs to `count` and the places behind it. Returns where they end."""
    while begin < end:
        target[0][count] = source[0][begin]
        target[1][count] = source[1][begin]
        begin += _ONE
        count += _ONE
    return count


@kernel
def _add_rest(
    first: _Pairs,
    second: _Pairs,
    total: _Pairs,
    a: np.uint64,
    end_a: np.uint64,
    b: np.uint64,
    end_b: np.uint64,
    count: np.uint64,
) -> np.uint64:
    """The merge from given positions to given ends. Returns where the result ends."""
    while a < end_a and b < end_b:
        a, b, count = _add_next(first, second, total, a, b, count)
    return _copy(second, b, end_b, total, _copy(first, a, end_a, total, count))


@kernel
def _add_sorted(first: _Pairs, second: _Pairs, total: _Pairs) -> np.int64:
    """Merge two ascending lists into one, adding the values of equal indices. Returns its length.

    Each step of a merge waits for the one before it, so two of them are done side by side: what
    lies below the middle of the first list, and the rest.
    """
    size_a, size_b = np.uint64(first[0].size), np.uint64(second[0].size)
    middle_a = size_a // np.uint64(2)
    middle_b = np.uint64(np.searchsorted(second[0], first[0][middle_a])) if size_a > 0 else size_b
    a = b = low = np.uint64(0)
    c, d, high = middle_a, middle_b, middle_a + middle_b
    while a < middle_a and b < middle_b and c < size_a and d < size_b:
        a, b, low = _add_next(first, second, total, a, b, low)
        c, d, high = _add_next(first, second, total, c, d, high)
    low = _add_rest(first, second, total, a, middle_a, b, middle_b, low)
    high = _add_rest(first, second, total, c, size_a, d, size_b, high)
    gap = middle_a + middle_b - low
    if gap > 0:
        _move_down(total[0], low, gap, high)
        _move_down(total[1], low, gap, high)
    return np.int64(high - gap)


@kernel
def _move_down(
    array: NDArray[np.generic], begin: np.uint64, gap: np.uint64, end: np.uint64
) -> None:
    """array[begin : end - gap] = array[begin + gap : end]."""
    for i in range(begin, end - gap):
        array[i] = array[i + gap]


@kernel
def _split_largest(
    indices: NDArray[np.int64],
    bits: NDArray[np.unsignedinteger],
    mask: np.unsignedinteger,
    kth: np.unsignedinteger,
    k: int,
    split_indices: NDArray[np.int64],
    split_bits: NDArray[np.unsignedinteger],
) -> tuple[np.int64, np.int64]:
    """Part the `k` largest magnitudes from the others; among equals the first ones are kept, zeros
    nowhere.

    Args:
        indices: shape (n,).
        bits: of the values, shape (n,).
        mask: the bits of a magnitude.
        kth: the k-th largest magnitude.
        k: in [0, n].
        split_indices: takes those kept from the beginning on, the others from `k` on; shape (n +
            1,).
        split_bits: the same.

    Returns:
        How many there are of both.
    """
    num_above = 0
    for i in range(bits.size):
        num_above += bits[i] & mask > kth
    num_equal = k - num_above
    kept, other = np.uint64(0), np.uint64(k)
    for i in range(indices.size):
        number = bits[i]
        key = number & mask
        equal = (key == kth) & (num_equal > 0)
        num_equal -= equal
        keep = ((key > kth) | equal) & (key > 0)
        place = kept if keep else other
        split_indices[place] = indices[i]
        split_bits[place] = number
        kept += np.uint64(keep)
        other += np.uint64((key > 0) & (not keep))
    return np.int64(kept), np.int64(other) - k


@kernel
def _split_common(
    pairs: _Pairs, others: NDArray[np.int64], inside: _Pairs, outside: _Pairs
) -> tuple[np.int64, np.int64]:
    """Part the pairs whose index is among the ascending `others` from the rest. Returns how many
    there are of both.
    """
    i = j = num_inside = num_outside = np.uint64(0)
    size = np.uint64(pairs[0].size)
    while i < size and j < others.size:
        index, other = pairs[0][i], others[j]
        inside[0][num_inside] = outside[0][num_outside] = index
        inside[1][num_inside] = outside[1][num_outside] = pairs[1][i]
        num_inside += np.uint64(index == other)
        num_outside += np.uint64(index < other)
        i += np.uint64(index <= other)
        j += np.uint64(other <= index)
    return np.int64(num_inside), np.int64(_copy(pairs, i, size, outside, num_outside))
