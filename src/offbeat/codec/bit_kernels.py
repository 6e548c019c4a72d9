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
    indices: NDArray[np.int64], shift: int, unary: NDArray[np.uint8], lower: NDArray[np.uint32]
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
                upper = np.int64(0)
            else:
                upper += 1
    return count


@kernel
def _side_by_side(
    codes: NDArray[np.uint8], count: int, bits: int, spare: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """What `pack` writes of the first `count` codes, of 1, 2, 4 or 8 bits, in one of the two
    arrays. Pairs are joined until they are bytes, in loops that the compiler can vectorise.

    Args:
        codes: is overwritten; has a place more than codes, and so has `spare`.
    """
    while bits < 8:
        codes[count] = 0  # beside the last of an odd number
        count = (count + 1) // 2
        for i in range(count):
            spare[i] = codes[2 * i] | (codes[2 * i + 1] << bits)
        codes, spare = spare, codes
        bits *= 2
    return codes[:count]


@kernel
def encode_linear(
    values: NDArray[np.floating],
    scales: NDArray[np.float32],
    block: int,
    bits: int,
    draws: NDArray[np.float32],
    packed: NDArray[np.uint8],
) -> None:
    """The evenly spaced level of each value, packed: level c of 0 to 2**bits - 1 stands for
    scale * (2 c / (2**bits - 1) - 1).

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude that can be said; 0: there is none.
        block: values of a block, a multiple of 8.
        bits: of a level: 1, 2, 4 or 8.
        draws: added to the level's exact place before the fraction is cut off: 1/2 rounds to
            nearest, random numbers in [0, 1) round at random without bias. Of one entry, which
            serves all values, or as many as there are values.
        packed: takes the levels.
    """
    codes, spare = np.empty(block + 1, dtype=np.uint8), np.empty(block + 1, dtype=np.uint8)
    highest = float((1 << bits) - 1)
    stride = 1 if draws.size > 1 else 0
    end = 0
    for number in range(scales.size):
        scale = np.float64(scales[number])  # the inverse of a tiny one is no float32
        factor = highest / 2 / scale if scale > 0 else 0.0
        part = values[number * block : (number + 1) * block]
        drawn = draws[number * block * stride :]
        for i in range(part.size):
            level = part[i] * factor + (highest / 2 + drawn[i * stride])
            # Neither `min` nor `max` of numbers would be vectorised.
            level = level if level > 0.0 else 0.0
            level = level if level < highest else highest
            codes[i] = np.uint8(np.int32(level))
        done = _side_by_side(codes, part.size, bits, spare)
        packed[end : end + done.size] = done
        end += done.size


@kernel
def encode_exponents(
    values: NDArray[np.floating], scales: NDArray[np.float32], block: int, packed: NDArray[np.uint8]
) -> None:
    """Signs and the nearest of eight magnitudes, in 4 bits each: 0 for zero, c from 1 to 7 for
    scale * 2**(c - 7), and 8 more below zero.

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude.
        block: values of a block, even.
        packed: takes the codes.
    """
    codes, spare = np.empty(block + 1, dtype=np.uint8), np.empty(block + 1, dtype=np.uint8)
    shares = np.empty(block, dtype=np.float32)
    words = shares.view(np.int32)
    smallest = np.array([2.0**-7], dtype=np.float32).view(np.int32)[0]
    end = 0
    for number in range(scales.size):
        scale = np.float64(scales[number])
        factor = 1 / scale if scale > 0 else 0.0
        part = values[number * block : (number + 1) * block]
        for i in range(part.size):
            shares[i] = np.float32(part[i] * factor)
        for i in range(part.size):
            magnitude = words[i] & np.int32(0x7FFF_FFFF)
            # Half a unit is added, so that cutting the fraction off rounds to nearest.
            code = ((magnitude + np.int32(0x40_0000)) >> np.int32(23)) - np.int32(120)
            least = np.int32(magnitude >= smallest)
            code = code if code > least else least
            code = code if code < np.int32(7) else np.int32(7)
            codes[i] = np.uint8(code | ((words[i] >> np.int32(28)) & np.int32(8)))
        done = _side_by_side(codes, part.size, 4, spare)
        packed[end : end + done.size] = done
        end += done.size


@kernel
def encode_signs(values: NDArray[np.floating], block: int, packed: NDArray[np.uint8]) -> None:
    """A bit for each value: whether it is above zero. `block` is a multiple of 8."""
    codes, spare = np.empty(block + 1, dtype=np.uint8), np.empty(block + 1, dtype=np.uint8)
    end = 0
    for begin in range(0, values.size, block):
        part = values[begin : begin + block]
        for i in range(part.size):
            codes[i] = np.uint8(part[i] > 0)
        done = _side_by_side(codes, part.size, 1, spare)
        packed[end : end + done.size] = done
        end += done.size


@kernel
def _codes_of(
    packed: NDArray[np.uint8], bits: int, codes: NDArray[np.uint8], spare: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Inverse of `_side_by_side`: the codes, in one of the two arrays. Bytes are halved until they
    are codes.

    Args:
        codes: has 8 places more than a block has codes, and so has `spare`.
    """
    codes[: packed.size] = packed
    count, width = packed.size, 8
    while width > bits:
        width //= 2
        mask = np.uint8((1 << width) - 1)
        for i in range(count):
            spare[2 * i] = codes[i] & mask
            spare[2 * i + 1] = codes[i] >> np.uint8(width)
        codes, spare = spare, codes
        count *= 2
    return codes


@kernel
def decode_linear(
    packed: NDArray[np.uint8],
    scales: NDArray[np.float32],
    block: int,
    bits: int,
    values: NDArray[np.float32],
) -> None:
    """What `encode_linear` has written. Levels are as far below zero as above, and the outermost
    ones are the scale itself.

    Args:
        packed: codes of 1, 2, 4 or 8 bits.
        scales: of each block of values.
        block: values of a block, a multiple of 8.
        bits: of a code.
        values: takes them.
    """
    buffer, spare = np.empty(block + 8, dtype=np.uint8), np.empty(block + 8, dtype=np.uint8)
    num_bytes = block * bits // 8
    highest = np.float32((1 << bits) - 1)
    share = np.float32(1 / highest)
    for number in range(scales.size):
        scale = scales[number]
        coded = packed[number * num_bytes : (number + 1) * num_bytes]
        codes = _codes_of(coded, bits, buffer, spare)
        part = values[number * block : (number + 1) * block]
        for i in range(part.size):
            level = np.float32(codes[i]) * np.float32(2) - highest
            part[i] = level * share * scale


@kernel
def decode_exponents(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], block: int, values: NDArray[np.float32]
) -> None:
    """What `encode_exponents` has written. Arguments as of `decode_linear`."""
    buffer, spare = np.empty(block + 8, dtype=np.uint8), np.empty(block + 8, dtype=np.uint8)
    words = np.empty(block, dtype=np.int32)
    shares = words.view(np.float32)
    for number in range(scales.size):
        scale = scales[number]
        codes = _codes_of(packed[number * block // 2 : (number + 1) * block // 2], 4, buffer, spare)
        part = values[number * block : (number + 1) * block]
        for i in range(part.size):
            code = np.int32(codes[i])
            magnitude = code & np.int32(7)
            exponent = (magnitude + np.int32(120)) << np.int32(23) if magnitude else np.int32(0)
            words[i] = exponent | ((code & np.int32(8)) << np.int32(28))
        for i in range(part.size):
            part[i] = shares[i] * scale
