"""How the values of a sparse message travel: a `ValueCodec`, chosen by value in a strategy's
options.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.jit import kernel
from offbeat.codec.option_value import OptionValue

WireValues: TypeAlias = NDArray[np.generic]
"""Values as they travel, contiguous, of any type. Bits are what counts, little-endian like every
machine that the kernels are compiled for.
"""


class ValueCodec(OptionValue):
    """Turns the values of a message into bytes and back."""

    code: ClassVar[int]
    """The byte that names the codec in a message: 0 to 7 are offbeat's, others may take 128 to
    255.
    """

    bits: int
    """Of a value on the wire, from 1 on."""

    table_bytes: int = 0
    """What a message has besides, before its values: a table of the numbers that codes stand for,
    say. A message of a whole vector has one for each piece of it (`codec.dense_wire`).
    """

    def num_bytes(self, count: float) -> float:
        """How many bytes so many values take, rounded up to whole ones."""
        return self.table_bytes + -(-count * self.bits // 8)

    @abstractmethod
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        """Values (float32 or float64, none zero) as they travel, in `num_bytes` of their number.
        What is beyond the codec's range becomes the largest value in it. May be `values` itself.
        """

    @abstractmethod
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        """Inverse of `encode` up to rounding: `count` values in float32 or float64.

        Args:
            coded: bytes that this array owns, `num_bytes` of `count`; whatever they are.
            count: number of values.
        """

    def is_exact_for(self, dtype: np.dtype[np.floating]) -> bool:
        """Whether no value of `dtype` is rounded. If one may be, what rounding loses is owed."""
        return False

    def suited_to(self, dtype: np.dtype[np.floating]) -> ValueCodec:
        """The codec that serves a vector of `dtype` in the place of this one."""
        return self


class _Float(ValueCodec):
    """Values as IEEE numbers of one width."""

    dtype: ClassVar[np.dtype[Any]]

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        if self.is_exact_for(values.dtype):
            return values.astype(self.dtype, copy=False)
        largest = np.finfo(self.dtype).max
        on_wire: WireValues = np.clip(values, -largest, largest).astype(self.dtype)
        return on_wire

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        return coded.view(self.dtype)

    @override
    def is_exact_for(self, dtype: np.dtype[np.floating]) -> bool:
        return dtype.itemsize <= self.dtype.itemsize


class Float64Values(_Float):
    """8 bytes a value."""

    code, bits = 1, 64
    dtype = np.dtype(np.float64)


class Float32Values(_Float):
    """4 bytes a value. Vectors of float64 travel as float64: nothing is rounded unless that is
    asked for.
    """

    code, bits = 0, 32
    dtype = np.dtype(np.float32)

    @override
    def suited_to(self, dtype: np.dtype[np.floating]) -> ValueCodec:
        return Float64Values() if dtype == np.float64 else self


class BFloat16Values(ValueCodec):
    """2 bytes a value: the upper half of a float32, rounded to nearest, ties to even."""

    code, bits = 2, 16

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        codes = np.empty(values.size, dtype=np.uint16)
        _round_to_bfloat16(values, codes)
        return codes

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        return (coded.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class Float8Values(ValueCodec):
    """1 byte a value: a sign, 6 bits of exponent and 1 of fraction, so 2**e or 1.5 * 2**e with e
    from -40 to 22.

    Rounding is off by at most a fifth. With error feedback twice as many entries of half the
    precision are worth more: what rounding loses is sent a little later, and an entry that does not
    travel waits for many steps. Natural compression (arXiv 1905.10988) rounds to powers of two
    alone, at random, since it owes nothing.
    """

    code, bits = 3, 8

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        codes = np.empty(values.size, dtype=np.uint8)
        _round_to_float8(values, codes)
        return codes

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        decoded: NDArray[np.floating] = _FLOAT8[coded]
        return decoded


def _float8() -> NDArray[np.float32]:
    """The number of each code: 0, 2**-40, 1.5 * 2**-40, ..., and the same below zero."""
    codes = np.arange(2, 0x7F)
    magnitudes = np.zeros(0x80, dtype=np.float32)
    magnitudes[2:0x7F] = np.ldexp(1 + (codes & 1) / 2, (codes >> 1) - 41)
    magnitudes[0x7F] = np.nan
    return np.concatenate((magnitudes, -magnitudes))


_FLOAT8: Final = _float8()


@kernel
def _round_to_bfloat16(values: NDArray[np.floating], codes: NDArray[np.uint16]) -> None:
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
def _round_to_float8(values: NDArray[np.floating], codes: NDArray[np.uint8]) -> None:
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
