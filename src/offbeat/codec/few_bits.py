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

Packed: TypeAlias = NDArray[np.uint8]
"""Codes side by side, the lowest bit first."""


def pack(codes: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.uint8]:
    """Codes of so many bits side by side, the lowest bit first.

    >>> pack(np.array([3, 1, 2], np.uint8), bits=2).tolist()
    [39]
    """
    packed = np.empty(-(-codes.size * bits // 8), dtype=np.uint8)
    bit_kernels.pack(codes, bits, packed)
    return packed


def unpack(coded: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint32]:
    """Inverse of `pack`, of `count` codes, which `coded` has bytes for."""
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
        if bits not in (1, 2, 4, 8):
            raise ConfigError(f"bits of {type(self).__name__} must be 1, 2, 4 or 8, got {bits}")
        self.bits = bits

    @override
    def num_bytes(self, count: float) -> float:
        return 4 * -(-count // BLOCK) + -(-count * self.bits // 8)

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        scales = self._scales(values)
        coded = np.empty(int(self.num_bytes(values.size)), dtype=np.uint8)
        coded[: scales.nbytes] = scales.view(np.uint8)
        self._pack(values, scales, coded[scales.nbytes :])
        return coded

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        at_codes = 4 * -(-count // BLOCK)
        scales, values = coded[:at_codes].view(np.float32), np.empty(count, dtype=np.float32)
        self._unpack(coded[at_codes:], scales, values)
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
    def _pack(self, values: NDArray[np.floating], scales: Scales, packed: Packed) -> None:
        """Write the code of each value into `packed`, in the order in which `pack` does."""

    def _unpack(self, packed: Packed, scales: Scales, values: NDArray[np.float32]) -> None:
        """Read what `_pack` has written. Codes are evenly spaced levels, unless it says else."""
        bit_kernels.decode_linear(packed, scales, BLOCK, self.bits, values)


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
    def _pack(self, values: NDArray[np.floating], scales: Scales, packed: Packed) -> None:
        draws = np.full(1, 0.5, dtype=np.float32)
        if self.stochastic:
            generator = np.random.default_rng(zlib.crc32(values.tobytes()))
            draws = generator.random(values.size, dtype=np.float32)
        bit_kernels.encode_linear(values, scales, BLOCK, self.bits, draws, packed)


class SignValues(_ScaledValues):
    """The sign of each value, which stands for the mean magnitude of its block (EF-SignSGD, arXiv
    1901.09847): of all scales the one that loses least.
    """

    code = 6
    scale_is_mean = True

    def __init__(self) -> None:
        super().__init__(bits=1)

    @override
    def _pack(self, values: NDArray[np.floating], scales: Scales, packed: Packed) -> None:
        bit_kernels.encode_signs(values, BLOCK, packed)


class E3M0Values(_ScaledValues):
    """4 bits: a sign and 3 bits of exponent. The largest magnitude of a block, its half, its
    quarter, to 1/64 of it; and zero.
    """

    code = 7

    def __init__(self) -> None:
        super().__init__(bits=4)

    @override
    def _pack(self, values: NDArray[np.floating], scales: Scales, packed: Packed) -> None:
        bit_kernels.encode_exponents(values, scales, BLOCK, packed)

    @override
    def _unpack(self, packed: Packed, scales: Scales, values: NDArray[np.float32]) -> None:
        bit_kernels.decode_exponents(packed, scales, BLOCK, values)


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
