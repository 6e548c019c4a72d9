"""One-pass CPU kernels over dense vectors, compiled by numba. They hold no GIL and allocate next to
nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.codec import bit_kernels, moves, rounding, sparse_kernels
from offbeat.codec.jit import bits_of, kernel, magnitude_mask

BLOCK = 32
"""Elements that are tested for candidates together; candidates are rare, so most blocks are passed
over vectorised.
"""

DIGIT_BITS = 16


@kernel
def _append(
    flat: NDArray[np.floating],
    begin: int,
    end: int,
    threshold: np.floating,
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    count: int,
) -> int:
    """Append what reaches `threshold` among at most `BLOCK` elements, without a branch for each;
    without room, only count.
    """
    if count > indices.size - BLOCK:
        for i in range(begin, end):
            count += not abs(flat[i]) < threshold
        return count
    for i in range(begin, end):
        indices[count] = i
        values[count] = flat[i]
        count += not abs(flat[i]) < threshold
    return count


@kernel
def collect(
    flat: NDArray[np.floating],
    threshold: np.floating,
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
) -> int:
    """List what reaches `threshold`, or is NaN.

    Args:
        flat: shape (n,).
        threshold: of the same dtype, > 0.
        indices: takes indices; `BLOCK` places more than are wanted.
        values: takes values; as large.

    Returns:
        How many there are. Beyond indices.size - BLOCK they are only counted.
    """
    count = 0
    for begin in range(0, flat.size, BLOCK):
        end = min(begin + BLOCK, flat.size)
        hit = False
        for i in range(begin, end):
            hit |= not abs(flat[i]) < threshold
        if hit:
            count = _append(flat, begin, end, threshold, indices, values, count)
    return count


@kernel
def accumulate(
    flat: NDArray[np.floating],
    residual: NDArray[np.floating],
    weight: np.floating,
    threshold: np.floating,
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
) -> tuple[int, bool]:
    """flat = residual + weight * flat, and `collect` it.

    Args:
        flat: shape (n,), overwritten.
        residual: shape (n,), of another memory.
        weight: of the same dtype.
        threshold: as of `collect`, and finite: so whatever is not finite reaches it.
        indices: as of `collect`.
        values: as of `collect`.

    Returns:
        The count, as of `collect`, and whether all of `flat` is finite.
    """
    count = 0
    finite = True
    whole = flat.size - flat.size % BLOCK
    for begin in range(0, whole, BLOCK):
        hit = False
        for i in range(
            begin, begin + BLOCK
        ):  # of a fixed length, which the compiler unrolls and vectorises
            x = residual[i] + weight * flat[i]
            flat[i] = x
            hit |= not abs(x) < threshold
        if hit:
            count = _append(flat, begin, begin + BLOCK, threshold, indices, values, count)
            for i in range(begin, begin + BLOCK):
                finite &= np.isfinite(flat[i])
    for i in range(whole, flat.size):
        flat[i] = residual[i] + weight * flat[i]
        finite &= np.isfinite(flat[i])
    return _append(flat, whole, flat.size, threshold, indices, values, count), finite


@kernel
def sample(
    flat: NDArray[np.floating],
    residual: NDArray[np.floating],
    weight: np.floating,
    out: NDArray[np.floating],
) -> None:
    """Write |residual + weight * flat| at `out.size` places, one at a scrambled place in each of as
    many equal strides.
    """
    stride = flat.size // out.size
    for i in range(out.size):
        j = i * stride + (i * 40503 & 0xFFFF) % stride
        out[i] = abs(residual[j] + weight * flat[j])


@kernel
def mix(
    flat: NDArray[np.floating],
    velocity: NDArray[np.floating],
    shares: NDArray[np.floating],
    new_velocity: NDArray[np.floating],
) -> None:
    """flat, new_velocity = a * flat + b * velocity, c * flat + d * velocity.

    Args:
        flat: shape (n,), overwritten.
        velocity: shape (n,).
        shares: a, b, c, d, of the same dtype.
        new_velocity: shape (n,), overwritten.
    """
    a, b, c, d = shares[0], shares[1], shares[2], shares[3]
    for i in range(flat.size):
        gradient, before = flat[i], velocity[i]
        flat[i] = a * gradient + b * before
        new_velocity[i] = c * gradient + d * before


@kernel
def digit_counts(
    bits: NDArray[np.unsignedinteger],
    mask: np.unsignedinteger,
    prefix: np.uint64,
    above: np.uint64,
    shift: np.uint64,
    counts: NDArray[np.int64],
) -> None:
    """Count the digits at `shift` of the magnitudes that agree with `prefix` in the bits `above`.

    `counts` has 2**DIGIT_BITS places.
    """
    counts[:] = 0
    for i in range(bits.size):
        key = np.uint64(bits[i] & mask)
        if key & above == prefix:
            counts[np.int64(key >> shift) & 0xFFFF] += 1


@kernel
def take_largest(
    bits: NDArray[np.unsignedinteger],
    mask: np.unsignedinteger,
    kth: np.unsignedinteger,
    k: int,
    out: NDArray[np.bool_],
) -> None:
    """Mark the `k` largest magnitudes, given the k-th; among equals the first ones."""
    left = k
    for i in range(bits.size):
        left -= bits[i] & mask > kth
    for i in range(bits.size):
        key = bits[i] & mask
        equal = key == kth and left > 0
        left -= equal
        out[i] = equal or key > kth


@kernel
def add_at(
    flat: NDArray[np.floating], indices: NDArray[np.int64], values: NDArray[np.floating]
) -> None:
    """flat[indices] += values, for indices within bounds."""
    for i in range(indices.size):
        flat[indices[i]] += values[i]


def warm() -> None:
    """Compile every kernel for float32 and float64, or load them from numba's cache on disk. Takes
    some 10 s the first time.
    """
    indices = np.zeros(1 + BLOCK, dtype=np.int64)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        one = dtype.type(1)
        values = np.zeros(1 + BLOCK, dtype=dtype)
        mask = magnitude_mask(dtype)
        bits, zero = bits_of(values), mask ^ mask
        marks = np.zeros(values.size, dtype=np.bool_)
        accumulate(values[:1], values[:1].copy(), one, one, indices, values.copy())
        collect(values[:1], one, indices, values.copy())
        sample(values, values.copy(), one, values[:1].copy())
        mix(values, values.copy(), np.zeros(4, dtype=dtype), values.copy())
        digit_counts(
            bits,
            mask,
            np.uint64(0),
            np.uint64(0),
            np.uint64(0),
            np.zeros(1 << DIGIT_BITS, dtype=np.int64),
        )
        take_largest(bits, mask, zero, 0, marks)
        add_at(values, indices[:1], values[:1].copy())
    sparse_kernels.warm()
    bit_kernels.warm()
    moves.warm()
    rounding.warm()
