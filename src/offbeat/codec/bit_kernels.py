"""Kernels that write codes of a few bits side by side, the lowest bit first, and read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel

_BYTE = np.uint64(8)
_ONE = np.uint64(1)


@kernel
def pack(codes: NDArray[np.unsignedinteger], bits: int, packed: NDArray[np.uint8]) -> None:
    """Write codes side by side.

    Args:
        codes: each below 2**bits.
        bits: of a code, 1 to 32.
        packed: takes them: as many bytes as the codes fill, rounded up.
    """
    width = np.uint64(bits)
    waiting, num_waiting, place = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(codes.size):
        waiting |= np.uint64(codes[i]) << num_waiting
        num_waiting += width
        while num_waiting >= _BYTE:
            packed[place] = np.uint8(waiting & np.uint64(0xFF))
            waiting >>= _BYTE
            num_waiting -= _BYTE
            place += _ONE
    if num_waiting:
        packed[place] = np.uint8(waiting & np.uint64(0xFF))


@kernel
def unpack(packed: NDArray[np.uint8], bits: int, codes: NDArray[np.unsignedinteger]) -> None:
    """Inverse of `pack`: reads as many codes as `codes` has places."""
    width = np.uint64(bits)
    mask = (_ONE << width) - _ONE
    waiting, num_waiting, place = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(codes.size):
        while num_waiting < width:
            waiting |= np.uint64(packed[place]) << num_waiting
            num_waiting += _BYTE
            place += _ONE
        codes[i] = waiting & mask
        waiting >>= width
        num_waiting -= width


@kernel
def count_rice(indices: NDArray[np.int64], shift: int) -> np.int64:
    """Bits of the unary halves that `encode_rice` writes."""
    position, count = np.int64(-1), np.int64(indices.size)
    for i in range(indices.size):
        count += (indices[i] - position - 1) >> shift
        position = indices[i]
    return count


@kernel
def encode_rice(
    indices: NDArray[np.int64],
    shift: int,
    unary: NDArray[np.uint8],
    lower: NDArray[np.uint32],
) -> None:
    """Rice codes of the gaps between ascending indices (Golomb's, with a power of two): a gap's
    upper bits as so many zeros and a one, its lower bits as they are.

    Args:
        indices: strictly ascending, >= 0.
        shift: how many bits are lower ones, 0 to 31.
        unary: zeros, in which `count_rice` bits are written, the lowest bit of a byte first.
        lower: takes the lower bits, which `pack` packs.
    """
    position, mask = np.int64(-1), (np.int64(1) << shift) - 1
    bit = np.int64(0)
    for i in range(indices.size):
        gap = indices[i] - position - 1
        bit += gap >> shift
        unary[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit += 1
        lower[i] = np.uint32(gap & mask)
        position = indices[i]


@kernel
def decode_rice(
    unary: NDArray[np.uint8], shift: int, lower: NDArray[np.uint32], indices: NDArray[np.int64]
) -> np.int64:
    """Inverse of `encode_rice`. Returns how many indices were found, which is less than there are
    places for if ones are missing.
    """
    position, upper, count = np.int64(-1), np.int64(0), np.int64(0)
    for place in range(unary.size):
        byte = np.int64(unary[place])
        for bit in range(8):
            if byte >> bit & 1:
                if count == indices.size:
                    return count + 1
                position += (upper << shift) + np.int64(lower[count]) + 1
                indices[count] = position
                count += 1
                upper = 0
            else:
                upper += 1
    return count


@kernel
def nearest_levels(
    values: NDArray[np.floating],
    scales: NDArray[np.float32],
    block: int,
    top: float,
    draws: NDArray[np.float32],
    codes: NDArray[np.uint8],
) -> None:
    """The evenly spaced level of each value: level c of 0 to `top` stands for
    scale * (2 c / top - 1).

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude that can be said; 0: there is none.
        block: values of a block.
        top: the highest level.
        draws: added to the level's exact place before the fraction is cut off: 1/2 rounds to
            nearest, random numbers in [0, 1) round at random without bias. Of one entry, which
            serves all values, or as many as there are values.
        codes: takes the levels.
    """
    for i in range(values.size):
        scale = scales[i // block]
        share = values[i] / scale if scale > 0 else values.dtype.type(0)
        place = (share + 1) * top / 2 + draws[i if draws.size > 1 else 0]
        place = place if place > 0 else 0.0
        codes[i] = np.uint8(min(place, top))


def warm() -> None:
    """Compile every kernel for all dtypes of values."""
    indices, lower = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint32)
    packed, codes = np.zeros(4, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    for each in (codes, lower):
        pack(each, 1, packed)
        unpack(packed, 1, each)
    count_rice(indices, 1)
    encode_rice(indices, 1, packed, lower)
    decode_rice(packed, 1, lower, indices)
    scales = np.ones(1, dtype=np.float32)
    for dtype in (np.float32, np.float64):
        nearest_levels(np.zeros(1, dtype=dtype), scales, 1, 1.0, scales, codes)
