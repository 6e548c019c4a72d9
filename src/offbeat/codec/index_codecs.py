"""How the indices of a sparse message travel: an `IndexCodec`, chosen by value in a strategy's
options.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec import sparse_kernels
from offbeat.codec.jit import bits_of, magnitude_mask
from offbeat.codec.option_value import OptionValue
from offbeat.codec.value_codecs import WireValues
from offbeat.errors import WireError


@dataclass(frozen=True, slots=True, eq=False)
class CodedEntries:
    """The entries of a message.

    Attributes:
        layout: a byte that says how `indices` is to be read.
        indices: the coded indices, contiguous, of any dtype and size.
        values: the values that travel, in the order of their indices.
    """

    layout: int
    indices: NDArray[np.generic]
    values: WireValues


class IndexCodec(OptionValue):
    """Turns ascending indices into bytes and back.

    It sees the values too, as they travel: those that are 0 after rounding are left out, and it may
    insert zeros of its own. "Zero" means that all bits but the topmost are 0.
    """

    usual_bytes: ClassVar[int]
    """Bytes of an index in a usual message, for estimates of cost."""

    def expected_bytes(self, num_pairs: float, num_elements: int, value_bytes: int) -> float:
        """How many bytes indices and values of a message are expected to take.

        Args:
            num_pairs: entries, at random places.
            num_elements: length of the vector.
            value_bytes: of a value as it travels.
        """
        return num_pairs * (self.usual_bytes + value_bytes)

    @abstractmethod
    def encode(
        self, indices: NDArray[np.int64], values: WireValues, num_elements: int
    ) -> CodedEntries:
        """Code the entries whose value is not zero.

        Args:
            indices: strictly ascending, in [0, num_elements).
            values: same shape, as they travel.
            num_elements: length of the vector.
        """

    @abstractmethod
    def num_bytes(self, layout: int, num_values: int, num_elements: int) -> int:
        """How many bytes the coded indices of so many values take. Raises `WireError` for a layout
        that is not this codec's.
        """

    @abstractmethod
    def decode(
        self, layout: int, coded: memoryview, values: WireValues, num_elements: int
    ) -> tuple[NDArray[np.int64], WireValues]:
        """Inverse of `encode`.

        Args:
            layout: as received; `num_bytes` has accepted it.
            coded: the coded indices, `num_bytes` long and not aligned.
            values: those that came with them.
            num_elements: length of the vector.

        Returns:
            Indices, strictly ascending and in [0, num_elements), and the value of each, none zero.

        Raises:
            WireError: they are not.
        """


class GapIndices(IndexCodec):
    """Gaps between indices in 2 bytes, or plain indices in 4 bytes (8 for more than 2**32
    elements): whichever makes the shorter message.

    Gaps too large for 2 bytes are bridged by entries of value zero. Gaps average less than 2**16 at
    any density above 1 / 2**16, so the usual index takes 2 bytes.
    """

    usual_bytes = 2

    _GAPS, _PLAIN_32, _PLAIN_64 = 0, 1, 2
    _DTYPES: ClassVar[Mapping[int, np.dtype[np.unsignedinteger]]] = {
        _GAPS: np.dtype(np.uint16),
        _PLAIN_32: np.dtype(np.uint32),
        _PLAIN_64: np.dtype(np.uint64),
    }

    @override
    def expected_bytes(self, num_pairs: float, num_elements: int, value_bytes: int) -> float:
        if num_pairs <= 0:
            return 0.0
        # Of gaps with a geometric distribution a share of `beyond` is longer than 2 bytes can say,
        # and each 65,536 of a gap take one more entry.
        beyond = math.exp(-min(700.0, 65_536 * num_pairs / num_elements))
        bridged = beyond / (1 - beyond) if beyond < 1 else math.inf
        plain = self._PLAIN_32 if num_elements <= 1 << 32 else self._PLAIN_64
        gap_bytes, plain_bytes = (
            self._DTYPES[layout].itemsize + value_bytes for layout in (self._GAPS, plain)
        )
        return num_pairs * min((1 + bridged) * gap_bytes, plain_bytes)

    @override
    def encode(
        self, indices: NDArray[np.int64], values: WireValues, num_elements: int
    ) -> CodedEntries:
        mask, bits = magnitude_mask(values.dtype), bits_of(values)
        plain = self._PLAIN_32 if num_elements <= 1 << 32 else self._PLAIN_64
        gap_bytes, plain_bytes = (
            self._DTYPES[layout].itemsize + values.itemsize for layout in (self._GAPS, plain)
        )
        # With more codes than there is room for, plain indices are shorter anyway.
        span = int(indices[-1]) + 1 if indices.size else 0
        room = min(indices.size + (span >> 16), indices.size * plain_bytes // gap_bytes)
        codes, coded = np.empty(room, dtype=np.uint16), np.empty(room, dtype=values.dtype)
        num_codes, num_entries = sparse_kernels.encode_gaps(
            indices, bits, mask, codes, bits_of(coded)
        )
        if 0 <= num_codes * gap_bytes <= num_entries * plain_bytes:
            return CodedEntries(self._GAPS, codes[:num_codes], coded[:num_codes])
        sent = np.flatnonzero(bits & mask)
        return CodedEntries(plain, indices[sent].astype(self._DTYPES[plain]), values[sent])

    @override
    def num_bytes(self, layout: int, num_values: int, num_elements: int) -> int:
        if layout not in self._DTYPES:
            raise WireError(
                f"a message has index layout {layout}, known are {sorted(self._DTYPES)}; it is"
                " damaged, or the ranks have different options"
            )
        return num_values * self._DTYPES[layout].itemsize

    @override
    def decode(
        self, layout: int, coded: memoryview, values: WireValues, num_elements: int
    ) -> tuple[NDArray[np.int64], WireValues]:
        mask, bits = magnitude_mask(values.dtype), bits_of(values)
        codes = np.frombuffer(coded, self._DTYPES[layout]).copy()  # which aligns them
        if layout == self._GAPS:
            indices = np.empty(codes.size, dtype=np.int64)
            num_entries, last = sparse_kernels.decode_gaps(codes, bits, mask, indices)
            indices, values = indices[:num_entries], values[:num_entries]
        else:
            indices = codes.astype(np.int64)
            last = indices[-1] if indices.size else np.int64(-1)
            if (indices[1:] <= indices[:-1]).any() or (indices.size and indices[0] < 0):
                raise WireError("the indices of a message do not ascend; it is damaged")
            sent = np.flatnonzero(bits & mask)
            indices, values = indices[sent], values[sent]
        if last >= num_elements:
            raise WireError(
                f"a message has index {last}, allowed are those below {num_elements}; it is damaged"
            )
        return indices, values


INDEX_CODECS: Final[Mapping[str, IndexCodec]] = {"gaps": GapIndices()}
"""Index codecs by the names that options may use for them."""
