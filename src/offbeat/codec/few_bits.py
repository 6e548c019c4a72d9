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

from offbeat.codec import bit_kernels
from offbeat.codec.value_codecs import ValueCodec, WireValues
from offbeat.errors import ConfigError

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
        return bit_kernels.join(codes.astype(np.uint8, copy=False), bits)
    packed = np.empty(-(-codes.size * bits // 8), dtype=np.uint8)
    bit_kernels.pack(codes, bits, packed)
    return packed


def unpack(coded: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.unsignedinteger]:
    """Inverse of `pack`, of `count` codes, which `coded` has bytes for."""
    if bits in _WHOLE_IN_BYTE:
        return bit_kernels.split(coded, bits)[:count]
    codes = np.empty(count, dtype=np.uint32)
    bit_kernels.unpack(coded, bits, codes)
    return codes


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
        bit_kernels.look_up(codes, self._shares(), scales, BLOCK, values)
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
        bit_kernels.linear_codes(values, scales, BLOCK, highest, draws, codes)
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
        bit_kernels.exponent_codes(values, scales, BLOCK, codes)
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
