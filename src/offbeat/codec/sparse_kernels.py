"""Kernels that walk along sorted pairs: sums, splits, owners, gaps between indices.

What an entry's fate depends on is as good as random, so loops select and count instead of
branching: a branch that cannot be predicted costs more than everything else that is done for an
entry. Positions are unsigned, which spares the test for Python's negative ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numba
import numpy as np
from numpy.typing import NDArray

from offbeat.arithmetic import fusion
from offbeat.codec.jit import bits_of, kernel, magnitude_mask

_ONE = np.uint64(1)
# Written for arrays, it serves for single indices as well. numba's cache follows this file alone:
# whoever changes that function has to touch this file too, or `deal` stays as it was.
_owner_of = cast(
    Callable[[np.uint64, np.uint64], np.uint32], numba.njit(nogil=True)(fusion.owner_of)
)


@kernel
def _add_next(
    indices_a: NDArray[np.int64],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.int64],
    values_b: NDArray[np.floating],
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    a: np.uint64,
    b: np.uint64,
    count: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """One step of the merge: writes the next pair, returns the positions after it."""
    index_a, index_b, value_a, value_b = indices_a[a], indices_b[b], values_a[a], values_b[b]
    takes_a, takes_b = index_a <= index_b, index_b <= index_a
    zero = values.dtype.type(0)
    indices[count] = min(index_a, index_b)
    values[count] = (value_a if takes_a else zero) + (value_b if takes_b else zero)
    return a + np.uint64(takes_a), b + np.uint64(takes_b), count + _ONE


@kernel
def _add_rest(
    indices_a: NDArray[np.int64],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.int64],
    values_b: NDArray[np.floating],
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    a: np.uint64,
    end_a: np.uint64,
    b: np.uint64,
    end_b: np.uint64,
    count: np.uint64,
) -> np.uint64:
    """The merge from given positions to given ends. Returns where the result ends."""
    while a < end_a and b < end_b:
        a, b, count = _add_next(
            indices_a, values_a, indices_b, values_b, indices, values, a, b, count
        )
    while a < end_a:
        indices[count] = indices_a[a]
        values[count] = values_a[a]
        a += _ONE
        count += _ONE
    while b < end_b:
        indices[count] = indices_b[b]
        values[count] = values_b[b]
        b += _ONE
        count += _ONE
    return count


@kernel
def add_sorted(
    indices_a: NDArray[np.int64],
    values_a: NDArray[np.floating],
    indices_b: NDArray[np.int64],
    values_b: NDArray[np.floating],
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
) -> np.int64:
    """Merge two ascending lists into one, adding the values of equal indices. Returns its length.

    Each step of a merge waits for the one before it, so two of them are done side by side: what
    lies below the middle of the
    first list, and the rest.
    """
    size_a, size_b = np.uint64(indices_a.size), np.uint64(indices_b.size)
    middle_a = size_a // np.uint64(2)
    middle_b = np.uint64(np.searchsorted(indices_b, indices_a[middle_a])) if size_a > 0 else size_b
    a = b = low = np.uint64(0)
    c, d, high = middle_a, middle_b, middle_a + middle_b
    while a < middle_a and b < middle_b and c < size_a and d < size_b:
        a, b, low = _add_next(indices_a, values_a, indices_b, values_b, indices, values, a, b, low)
        c, d, high = _add_next(
            indices_a, values_a, indices_b, values_b, indices, values, c, d, high
        )
    low = _add_rest(
        indices_a, values_a, indices_b, values_b, indices, values, a, middle_a, b, middle_b, low
    )
    high = _add_rest(
        indices_a, values_a, indices_b, values_b, indices, values, c, size_a, d, size_b, high
    )
    gap = middle_a + middle_b - low
    if gap > 0:
        _move_down(indices, low, gap, high)
        _move_down(values, low, gap, high)
    return np.int64(high - gap)


@kernel
def _move_down(
    array: NDArray[np.generic], begin: np.uint64, gap: np.uint64, end: np.uint64
) -> None:
    """array[begin : end - gap] = array[begin + gap : end]."""
    for i in range(begin, end - gap):
        array[i] = array[i + gap]


@kernel
def split_largest(
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
def split_common(
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    others: NDArray[np.int64],
    inside_indices: NDArray[np.int64],
    inside_values: NDArray[np.floating],
    outside_indices: NDArray[np.int64],
    outside_values: NDArray[np.floating],
) -> tuple[np.int64, np.int64]:
    """Part the pairs whose index is among the ascending `others` from the rest. Returns how many
    there are of both.
    """
    i = j = num_inside = num_outside = np.uint64(0)
    while i < indices.size and j < others.size:
        index, other = indices[i], others[j]
        inside_indices[num_inside] = outside_indices[num_outside] = index
        inside_values[num_inside] = outside_values[num_outside] = values[i]
        num_inside += np.uint64(index == other)
        num_outside += np.uint64(index < other)
        i += np.uint64(index <= other)
        j += np.uint64(other <= index)
    while i < indices.size:
        outside_indices[num_outside] = indices[i]
        outside_values[num_outside] = values[i]
        num_outside += _ONE
        i += _ONE
    return np.int64(num_inside), np.int64(num_outside)


@kernel
def deal(
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    owners: NDArray[np.uint32],
    ends: NDArray[np.int64],
    dealt_indices: NDArray[np.int64],
    dealt_values: NDArray[np.floating],
) -> None:
    """Sort pairs by owner (`planning.fusion.owner_of`), keeping their order otherwise.

    Args:
        indices: shape (n,).
        values: shape (n,).
        owners: takes each pair's owner, shape (n,).
        ends: takes where each owner's pairs end, shape (number of owners,).
        dealt_indices: takes the result, shape (n,).
        dealt_values: the same.
    """
    ends[:] = 0
    num_owners = np.uint64(ends.size)
    for i in range(indices.size):
        owners[i] = _owner_of(np.uint64(indices[i]), num_owners)
        ends[owners[i]] += 1
    begin = 0
    for each in range(ends.size):
        ends[each], begin = begin, begin + ends[each]
    for i in range(indices.size):
        owner = np.uint64(owners[i])
        place = np.uint64(ends[owner])
        ends[owner] += 1
        dealt_indices[place] = indices[i]
        dealt_values[place] = values[i]


@kernel
def encode_gaps(indices: NDArray[np.int64], codes: NDArray[np.unsignedinteger]) -> None:
    """Code ascending indices by their gaps. The largest code stands for so many elements without an
    entry, the others for as many and an entry behind them.

    Args:
        indices: strictly ascending, >= 0.
        codes: uint8 or uint16, as long as `count_gaps` says.
    """
    longest = (np.int64(1) << np.int64(8 * codes.itemsize)) - 1
    position = np.int64(-1)
    count = np.uint64(0)
    for i in range(indices.size):
        beyond = indices[i] - position - 1
        while beyond >= longest:
            codes[count] = longest
            count += _ONE
            beyond -= longest
        codes[count] = beyond
        count += _ONE
        position = indices[i]


@kernel
def count_gaps(indices: NDArray[np.int64]) -> tuple[np.int64, np.int64]:
    """How many codes `encode_gaps` writes, of 1 and of 2 bytes."""
    position = np.int64(-1)
    count, long_count = np.int64(indices.size), np.int64(indices.size)
    for i in range(indices.size):
        beyond = indices[i] - position - 1
        if beyond >= 0xFF:  # divisions take long, and most gaps need none
            count += beyond // 0xFF
            long_count += beyond // 0xFFFF
        position = indices[i]
    return count, long_count


@kernel
def decode_gaps(
    codes: NDArray[np.unsignedinteger], indices: NDArray[np.int64]
) -> tuple[np.int64, np.bool_]:
    """Inverse of `encode_gaps`: writes `indices`, which has room for as many as there are codes.

    Returns how many there are, and whether the last code brings one.
    """
    longest = (np.int64(1) << np.int64(8 * codes.itemsize)) - 1
    position = np.int64(-1)
    count = np.uint64(0)
    is_entry: np.bool_ = np.int64(0) < longest
    for i in range(codes.size):
        code = np.int64(codes[i])
        is_entry = code < longest
        position += code + is_entry
        indices[count] = position
        count += np.uint64(is_entry)
    return np.int64(count), is_entry


@kernel
def differences(
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    rounded: NDArray[np.floating],
    different: NDArray[np.int64],
    errors: NDArray[np.floating],
) -> np.int64:
    """List values - rounded wherever it is not zero; a NaN has no difference from anything. Returns
    how many there are.
    """
    count = np.uint64(0)
    for i in range(indices.size):
        value = values[i]
        different[count] = indices[i]
        errors[count] = value - rounded[i]
        count += np.uint64((value != rounded[i]) & (value == value))
    return np.int64(count)


@kernel
def round_to_bfloat16(values: NDArray[np.floating], codes: NDArray[np.uint16]) -> None:
    """Leading halves of the float32 numbers, rounded to nearest, ties to even; infinities become
    the largest number.

    Float64 values are rounded to float32 first.
    """
    for i in range(values.size):
        # Each result is cut to 32 bits, or the processor would take half as many at once.
        bits = np.float32(values[i]).view(np.uint32)
        magnitude = np.uint32(bits & np.uint32(0x7FFF_FFFF))
        odd = np.uint32(np.uint32(magnitude >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        code = rounded if rounded < np.uint32(0x7F80) else np.uint32(0x7F7F)
        code = code if magnitude <= np.uint32(0x7F80_0000) else np.uint32(0x7FC0)  # not a number
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        codes[i] = np.uint16(code | sign)


@kernel
def round_to_float8(values: NDArray[np.floating], codes: NDArray[np.uint8]) -> None:
    """The sign, 6 bits of exponent and 1 bit of fraction of each number: 2**e or 1.5 * 2**e with e
    from -40 to 22, rounded to nearest. Smaller ones become zero, larger ones the largest.
    """
    for i in range(values.size):
        bits = np.int64(np.float32(values[i]).view(np.uint32))
        magnitude = bits & 0x7FFF_FFFF
        # Half a unit is added, so that cutting the other 22 bits of the fraction off rounds. The
        # code of 2**-40 is 2: what is less than half of it is 0 or below.
        code = ((magnitude + 0x20_0000) >> 22) - 2 * (127 - 40) + 2
        code = code if code >= 2 else np.int64(0)
        code = code if code < 0x7F else np.int64(0x7E)
        if magnitude > 0x7F80_0000:  # not a number
            code = np.int64(0x7F)
        codes[i] = code | (bits >> 24 & 0x80)


@kernel
def _magnitude(value: np.floating) -> np.int64:
    """The leading 16 bits of |value| as float32."""
    return np.int64(np.float32(abs(value)).view(np.uint32)) >> 15


@kernel
def count_magnitudes(
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
    magnitudes, counts = (
        np.empty(counters.size, dtype=np.uint16),
        np.empty(counters.size, dtype=np.uint32),
    )
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


@kernel
def grant(
    magnitudes: NDArray[np.uint16], counts: NDArray[np.uint32], ends: NDArray[np.int64], k: int
) -> NDArray[np.int64]:
    """How many entries each owner keeps of the `k` largest. At the boundary those of lower owners
    come first.

    Args:
        magnitudes: one owner's after the other's.
        counts: entries of each.
        ends: where each owner's end.
        k: how many to keep altogether.
    """
    totals = np.zeros(1 + (magnitudes.max() if magnitudes.size else 0), dtype=np.int64)
    for i in range(magnitudes.size):
        totals[magnitudes[i]] += counts[i]
    boundary, above = totals.size, 0
    while boundary > 0 and above < k:
        boundary -= 1
        above += totals[boundary]
    left = totals[boundary] - (above - k) if above > k else k
    granted = np.zeros(ends.size, dtype=np.int64)
    begin = 0
    for owner in range(ends.size):
        for i in range(begin, ends[owner]):
            if magnitudes[i] > boundary:
                granted[owner] += counts[i]
            elif magnitudes[i] == boundary:
                share = min(np.int64(counts[i]), left)
                granted[owner] += share
                left -= share
        begin = ends[owner]
    return granted


def warm() -> None:
    """Compile every kernel for all dtypes of values, in memory and on the wire."""
    indices = np.zeros(1, dtype=np.int64)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        values = np.ones(1, dtype=dtype)
        mask = magnitude_mask(dtype)
        pairs = indices.copy(), values.copy()
        add_sorted(
            indices, values, indices, values, np.zeros(2, dtype=np.int64), np.zeros(2, dtype=dtype)
        )
        split_largest(
            indices,
            bits_of(values),
            mask,
            mask,
            0,
            np.zeros(2, dtype=np.int64),
            np.zeros(2, dtype=mask.dtype),
        )
        split_common(indices, values, indices, *pairs, *pairs)
        deal(indices, values, np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.int64), *pairs)
        differences(indices, values, values, *pairs)
        round_to_bfloat16(values, np.zeros(1, dtype=np.uint16))
        round_to_float8(values, np.zeros(1, dtype=np.uint8))
        grant(*count_magnitudes(values, 0, 1), indices, 1)
    count_gaps(indices)
    for codes in (np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.uint16)):
        encode_gaps(indices, codes)
        decode_gaps(codes, indices.copy())
