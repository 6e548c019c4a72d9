"""Values in 1 to 8 bits. A message brings what its codes stand for: a scale for each block of
values, or a table.

What rounding loses is owed, as with every `ValueCodec`; so 4 bits are enough where errors are fed
back (MuLoCo, arXiv 2505.23725, and Streaming DiLoCo, arXiv 2501.18512, on differences of weights).
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.jit import kernel
from offbeat.codec.value_codecs import ValueCodec, WireValues
from offbeat.errors import ConfigError

_BYTE = np.uint64(8)
_ONE = np.uint64(1)

BLOCK: Final = 1024
"""Values that share a scale: layers, whose magnitudes differ by orders, are then apart."""

Scales: TypeAlias = NDArray[np.float32]
"""Of each block."""

Codes: TypeAlias = NDArray[np.uint8]
"""Of each value."""

_WHOLE_IN_BYTE: Final = (1, 2, 4, 8)
"""Bits of codes that no byte ends within, which are written faster."""


def pack(codes: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.uint8]:
    """Codes of so many bits side by side, the lowest bit first.

    >>> pack(np.array([3, 1, 2], np.uint8), bits=2).tolist()
    [39]
    """
    if bits in _WHOLE_IN_BYTE:
        return _join(codes.astype(np.uint8, copy=False), bits)
    return _pack_bits(codes, bits)


def unpack(coded: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.unsignedinteger]:
    """Inverse of `pack`, of `count` codes, which `coded` has bytes for."""
    if bits in _WHOLE_IN_BYTE:
        return _split(coded, bits)[:count]
    return _unpack_bits(coded, bits, count)


class _ScaledValues(ValueCodec):
    """Codes of a few bits, with a float32 scale for each block of values before them.

    Args:
        bits: of a value: 1, 2, 4 or 8.
    """

    scale_is_mean: ClassVar[bool] = False
    """Whether a block's scale is its mean magnitude, and not the largest."""

    def __init__(self, bits: int) -> None:
        if bits not in _WHOLE_IN_BYTE:
            raise ConfigError(f"bits of {type(self).__name__} must be 1, 2, 4 or 8, got {bits}")
        self.bits = bits

    @override
    def num_bytes(self, count: float) -> float:
        return 4 * -(-count // BLOCK) + -(-count * self.bits // 8)

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        scales = self._scales(values)
        packed = pack(self._codes(values, scales), self.bits)
        return np.concatenate([scales.view(np.uint8), packed])

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        at_codes = 4 * -(-count // BLOCK)
        scales, values = coded[:at_codes].view(np.float32), np.empty(count, dtype=np.float32)
        codes = unpack(coded[at_codes:], self.bits, count)
        _look_up(codes, self._shares(), scales, values)
        return values

    def _scales(self, values: NDArray[np.floating]) -> Scales:
        """Of each block, at most what float32 can say."""
        begins = np.arange(0, values.size, BLOCK)
        magnitudes = np.abs(values)
        if self.scale_is_mean:
            with np.errstate(over="ignore"):
                scales = np.add.reduceat(magnitudes, begins)
            scales /= np.minimum(values.size - begins, BLOCK)
        else:
            scales = np.maximum.reduceat(magnitudes, begins)
        return np.fmin(scales, np.finfo(np.float32).max).astype(np.float32)

    @abstractmethod
    def _codes(self, values: NDArray[np.floating], scales: Scales) -> Codes:
        """The code of each value."""

    def _shares(self) -> NDArray[np.float32]:
        """What each code stands for, as a share of the scale. They are evenly spaced, unless the
        codec says else.
        """
        highest = np.float32((1 << self.bits) - 1)
        levels = np.arange(1 << self.bits, dtype=np.float32) * np.float32(2) - highest
        return levels * (1 / highest)


class LinearValues(_ScaledValues):
    """2**bits levels, evenly spaced from minus to plus the largest magnitude of a block.

    Args:
        bits: of a value: 1, 2, 4 or 8.
        stochastic: round to one of the two nearest levels at random, so that the expected value is
            exact (QSGD, arXiv 1610.02132), and not to the nearest one. The draws depend on the
            values alone.
    """

    code = 5

    def __init__(self, bits: int, *, stochastic: bool = False) -> None:
        super().__init__(bits)
        self.stochastic = stochastic

    @override
    def _codes(self, values: NDArray[np.floating], scales: Scales) -> Codes:
        draws = np.full(1, 0.5, dtype=np.float32)
        if self.stochastic:
            generator = np.random.default_rng(zlib.crc32(values.tobytes()))
            draws = generator.random(values.size, dtype=np.float32)
        codes, highest = np.empty(values.size, dtype=np.uint8), (1 << self.bits) - 1.0
        _linear_codes(values, scales, highest, draws, codes)
        return codes


class SignValues(_ScaledValues):
    """The sign of each value, which stands for the mean magnitude of its block (EF-SignSGD, arXiv
    1901.09847): of all scales the one that loses least.
    """

    code = 6
    scale_is_mean = True

    def __init__(self) -> None:
        super().__init__(bits=1)

    @override
    def _codes(self, values: NDArray[np.floating], scales: Scales) -> Codes:
        return (values > 0).view(np.uint8)


class E3M0Values(_ScaledValues):
    """4 bits: a sign and 3 bits of exponent. The largest magnitude of a block, its half, its
    quarter, to 1/64 of it; and zero.
    """

    code = 7

    def __init__(self) -> None:
        super().__init__(bits=4)

    @override
    def _codes(self, values: NDArray[np.floating], scales: Scales) -> Codes:
        codes = np.empty(values.size, dtype=np.uint8)
        _exponent_codes(values, scales, codes)
        return codes

    @override
    def _shares(self) -> NDArray[np.float32]:
        magnitudes = np.ldexp(np.float32(1), np.arange(-7, 1))
        magnitudes[0] = 0
        return np.concatenate([magnitudes, -magnitudes])


class LevelValues(ValueCodec):
    """Levels of equal width over three standard deviations to either side of the mean; each is read
    as the mean of the values in it, which stands in the message (SparseLoCo, arXiv 2508.15706).

    Args:
        bits: of a value, 1 to 8: there are 2**bits levels.
    """

    code = 4

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.table_bytes = 4 << bits

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        num_levels = 1 << self.bits
        wide = values.astype(np.float64)
        centre, sigma = (wide.mean(), wide.std()) if wide.size else (0.0, 0.0)
        levels = (wide - centre) * (num_levels / (6 * sigma or 1.0)) + num_levels / 2
        codes = np.clip(levels, 0, num_levels - 1).astype(np.uint8)
        counts = np.bincount(codes, minlength=num_levels)
        sums = np.bincount(codes, weights=wide, minlength=num_levels)
        means = (sums / np.maximum(counts, 1)).astype(np.float32)
        return np.concatenate([means.view(np.uint8), pack(codes, self.bits)])

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        table = coded[: self.table_bytes].view(np.float32)
        decoded: NDArray[np.floating] = table[unpack(coded[self.table_bytes :], self.bits, count)]
        return decoded


@kernel
def _pack_bits(codes: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.uint8]:
    """Codes side by side, each below 2**bits, of 1 to 32 bits; or of none, which take no bytes."""
    packed = np.empty((codes.size * bits + 7) // 8, dtype=np.uint8)
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
    return packed


@kernel
def _unpack_bits(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint32]:
    """Inverse of `_pack_bits`."""
    codes = np.empty(count, dtype=np.uint32)
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
    return codes


@kernel
def _join(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What `_pack_bits` writes of codes of 1, 2, 4 or 8 bits. Pairs are joined until they are
    bytes, in loops that the compiler can vectorise.
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
def _split(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Inverse of `_join`: as many codes as there is room for. Bytes are halved until they are
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
def _linear_codes(
    values: NDArray[np.floating],
    scales: NDArray[np.float32],
    highest: float,
    draws: NDArray[np.float32],
    codes: NDArray[np.uint8],
) -> None:
    """The evenly spaced level of each value: level c of 0 to `highest` stands for
    scale * (2 c / highest - 1).

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude that can be said; 0: there is none.
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
        part = values[number * BLOCK : (number + 1) * BLOCK]
        coded = codes[number * BLOCK : (number + 1) * BLOCK]
        drawn = draws[number * BLOCK * stride :]
        for i in range(part.size):
            level = part[i] * factor + (highest / 2 + drawn[i * stride])
            # Neither `min` nor `max` of numbers would be vectorised.
            level = level if level > 0.0 else 0.0
            level = level if level < highest else highest
            coded[i] = np.uint8(np.int32(level))


@kernel
def _exponent_codes(
    values: NDArray[np.floating], scales: NDArray[np.float32], codes: NDArray[np.uint8]
) -> None:
    """Signs and the nearest of eight magnitudes: 0 for zero, c from 1 to 7 for scale * 2**(c - 7),
    and 8 more below zero.

    Args:
        values: what is rounded.
        scales: of each block of values, the largest magnitude.
        codes: takes the codes.
    """
    shares = np.empty(BLOCK, dtype=np.float32)
    words = shares.view(np.int32)
    smallest = np.array([2.0**-7], dtype=np.float32).view(np.int32)[0]
    for number in range(scales.size):
        scale = np.float64(scales[number])
        factor = 1 / scale if scale > 0 else 0.0
        part = values[number * BLOCK : (number + 1) * BLOCK]
        coded = codes[number * BLOCK : (number + 1) * BLOCK]
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
def _look_up(
    codes: NDArray[np.uint8],
    shares: NDArray[np.float32],
    scales: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    """Each code's number: its share of the scale of its block.

    Args:
        codes: shape (n,).
        shares: of each code.
        scales: of each block.
        values: takes them, shape (n,).
    """
    for number in range(scales.size):
        scale = scales[number]
        coded = codes[number * BLOCK : (number + 1) * BLOCK]
        part = values[number * BLOCK : (number + 1) * BLOCK]
        for i in range(part.size):
            part[i] = shares[coded[i]] * scale
