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
def join(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What `pack` writes of codes of 1, 2, 4 or 8 bits. Pairs are joined until they are bytes, in
    loops that the compiler can vectorise.
    """
    while bits < 8:
        pairs = np.empty((codes.size + 1) // 2, dtype=np.uint8)
        for i in range(codes.size // 2):
            pairs[i] = codes[2 * i] | (codes[2 * i + 1] << bits)
        if codes.size % 2:
            pairs[-1] = codes[-1]
        codes = pairs
        bits *= 2
    return codes


@kernel
def split(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Inverse of `join`: as many codes as there is room for. Bytes are halved until they are
    codes.
    """
    width = 8
    while width > bits:
        width //= 2
        mask = np.uint8((1 << width) - 1)
        halves = np.empty(2 * packed.size, dtype=np.uint8)
        for i in range(packed.size):
            halves[2 * i] = packed[i] & mask
            halves[2 * i + 1] = packed[i] >> np.uint8(width)
        packed = halves
    return packed


@kernel
def linear_codes(
    values: NDArray[np.floating],
    scales: NDArray[np.float32],
    block: int,
    highest: float,
    draws: NDArray[np.float32],
    codes: NDArray[np.uint8],
) -> None:
    """The evenly spaced level of each value: level c of 0 to `highest` stands for
    scale * (2 c / highest - 1).

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude that can be said; 0: there is none.
        block: values of a block.
        highest: the number of the highest level.
        draws: added to the level's exact place before the fraction is cut off: 1/2 rounds to
            nearest, random numbers in [0, 1) round at random without bias. Of one entry, which
            serves all values, or as many as there are values.
        codes: takes the levels.
    """
    stride = 1 if draws.size > 1 else 0
    for number in range(scales.size):
        scale = np.float64(scales[number])  # the inverse of a tiny one is no float32
        factor = highest / 2 / scale if scale > 0 else 0.0
        part = values[number * block : (number + 1) * block]
        coded = codes[number * block : (number + 1) * block]
        drawn = draws[number * block * stride :]
        for i in range(part.size):
            level = part[i] * factor + (highest / 2 + drawn[i * stride])
            # Neither `min` nor `max` of numbers would be vectorised.
            level = level if level > 0.0 else 0.0
            level = level if level < highest else highest
            coded[i] = np.uint8(np.int32(level))


@kernel
def exponent_codes(
    values: NDArray[np.floating], scales: NDArray[np.float32], block: int, codes: NDArray[np.uint8]
) -> None:
    """Signs and the nearest of eight magnitudes: 0 for zero, c from 1 to 7 for scale * 2**(c - 7),
    and 8 more below zero.

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude.
        block: values of a block.
        codes: takes the codes.
    """
    shares = np.empty(block, dtype=np.float32)
    words = shares.view(np.int32)
    smallest = np.array([2.0**-7], dtype=np.float32).view(np.int32)[0]
    for number in range(scales.size):
        scale = np.float64(scales[number])
        factor = 1 / scale if scale > 0 else 0.0
        part = values[number * block : (number + 1) * block]
        coded = codes[number * block : (number + 1) * block]
        for i in range(part.size):
            shares[i] = np.float32(part[i] * factor)
        for i in range(part.size):
            magnitude = words[i] & np.int32(0x7FFF_FFFF)
            # Half a unit is added, so that cutting the fraction off rounds to nearest.
            code = ((magnitude + np.int32(0x40_0000)) >> np.int32(23)) - np.int32(120)
            least = np.int32(magnitude >= smallest)
            code = code if code > least else least
            code = code if code < np.int32(7) else np.int32(7)
            coded[i] = np.uint8(code | ((words[i] >> np.int32(28)) & np.int32(8)))


@kernel
def look_up(
    codes: NDArray[np.uint8],
    shares: NDArray[np.float32],
    scales: NDArray[np.float32],
    block: int,
    values: NDArray[np.float32],
) -> None:
    """Each code's number: its share of the scale of its block.

    Args:
        codes: shape (n,).
        shares: of each code.
        scales: of each block.
        block: values of a block.
        values: takes them, shape (n,).
    """
    for number in range(scales.size):
        scale = scales[number]
        coded = codes[number * block : (number + 1) * block]
        part = values[number * block : (number + 1) * block]
        for i in range(part.size):
            part[i] = shares[coded[i]] * scale
