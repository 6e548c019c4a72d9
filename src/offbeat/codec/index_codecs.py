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
    """Bytes of an index in a usual message, for `expected_bytes` as it stands here."""

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
    """Gaps between indices in 1 or in 2 bytes, or a bit for each element of the vector, or plain
    indices in 4 bytes (8 for more than 2**32 elements): whichever makes the shortest message.

    Gaps too large for their bytes are bridged by entries of value zero. At a density of 0.01 the
    usual index takes 1 byte, at 0.001 it takes 2, and above 1/8 less than 1.
    """

    _GAPS, _PLAIN_32, _PLAIN_64, _SHORT_GAPS, _BITMAP = range(5)
    _DTYPES: ClassVar[Mapping[int, np.dtype[np.unsignedinteger]]] = {
        _GAPS: np.dtype(np.uint16),
        _PLAIN_32: np.dtype(np.uint32),
        _PLAIN_64: np.dtype(np.uint64),
        _SHORT_GAPS: np.dtype(np.uint8),
    }

    @override
    def expected_bytes(self, num_pairs: float, num_elements: int, value_bytes: int) -> float:
        if num_pairs <= 0:
            return 0.0

        def with_gaps(layout: int) -> float:
            # Of gaps with a geometric distribution a share of `beyond` is longer than a code can
            # say, and each time it is one more entry is needed.
            code_bytes = self._DTYPES[layout].itemsize
            beyond = math.exp(-min(700.0, (1 << 8 * code_bytes) * num_pairs / num_elements))
            bridged = beyond / (1 - beyond) if beyond < 1 else math.inf
            return num_pairs * (1 + bridged) * (code_bytes + value_bytes)

        plain = self._DTYPES[self._plain(num_elements)].itemsize
        return min(
            with_gaps(self._SHORT_GAPS),
            with_gaps(self._GAPS),
            num_pairs * (plain + value_bytes),
            num_elements / 8 + num_pairs * value_bytes,
        )

    @override
    def encode(
        self, indices: NDArray[np.int64], values: WireValues, num_elements: int
    ) -> CodedEntries:
        mask, bits = magnitude_mask(values.dtype), bits_of(values)
        num_sent, num_short, num_long = sparse_kernels.count_gaps(indices, bits, mask)
        plain = self._plain(num_elements)
        counts = {self._SHORT_GAPS: num_short, self._GAPS: num_long, plain: num_sent}
        total_bytes = {
            layout: int(count) * (self._DTYPES[layout].itemsize + values.itemsize)
            for layout, count in counts.items()
        }
        total_bytes[self._BITMAP] = _bitmap_bytes(num_elements) + int(num_sent) * values.itemsize
        layout = min(total_bytes, key=total_bytes.__getitem__)
        if layout in (self._SHORT_GAPS, self._GAPS):
            codes = np.empty(counts[layout], dtype=self._DTYPES[layout])
            coded = np.empty(counts[layout], dtype=values.dtype)
            sparse_kernels.encode_gaps(indices, bits, mask, codes, bits_of(coded))
            return CodedEntries(layout, codes, coded)
        sent = np.flatnonzero(bits & mask)
        indices, values = indices[sent], values[sent]
        if layout == plain:
            return CodedEntries(layout, indices.astype(self._DTYPES[plain]), values)
        is_sent = np.zeros(num_elements, dtype=np.bool_)
        is_sent[indices] = True
        return CodedEntries(layout, np.packbits(is_sent, bitorder="little"), values)

    @override
    def num_bytes(self, layout: int, num_values: int, num_elements: int) -> int:
        if layout == self._BITMAP:
            return _bitmap_bytes(num_elements)
        if layout not in self._DTYPES:
            raise WireError(
                f"a message has index layout {layout}, known are"
                f" {sorted((*self._DTYPES, self._BITMAP))}; it is damaged, or the ranks have"
                " different options"
            )
        return num_values * self._DTYPES[layout].itemsize

    @override
    def decode(
        self, layout: int, coded: memoryview, values: WireValues, num_elements: int
    ) -> tuple[NDArray[np.int64], WireValues]:
        mask, bits = magnitude_mask(values.dtype), bits_of(values)
        if layout in (self._SHORT_GAPS, self._GAPS):
            codes = np.frombuffer(coded, self._DTYPES[layout]).copy()  # which aligns them
            indices = np.empty(codes.size, dtype=np.int64)
            num_entries, last = sparse_kernels.decode_gaps(codes, bits, mask, indices)
            _require_below(last, num_elements)
            return indices[:num_entries], values[:num_entries]
        if layout == self._BITMAP:
            bitmap = np.frombuffer(coded, np.uint8)
            indices = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
            if indices.size != values.size:
                raise WireError(
                    f"the bitmap of a message names {indices.size} entries and {values.size} came"
                    " with it; it is damaged"
                )
        else:
            indices = np.frombuffer(coded, self._DTYPES[layout]).astype(np.int64)
            if (indices[1:] <= indices[:-1]).any() or (indices.size and indices[0] < 0):
                raise WireError("the indices of a message do not ascend; it is damaged")
        if indices.size:
            _require_below(indices[-1], num_elements)
        sent = np.flatnonzero(bits & mask)
        return indices[sent], values[sent]

    def _plain(self, num_elements: int) -> int:
        """The layout of plain indices."""
        return self._PLAIN_32 if num_elements <= 1 << 32 else self._PLAIN_64


def _bitmap_bytes(num_elements: int) -> int:
    return -(-num_elements // 8)


def _require_below(last: np.int64, num_elements: int) -> None:
    if last >= num_elements:
        raise WireError(
            f"a message has index {last}, allowed are those below {num_elements}; it is damaged"
        )


INDEX_CODECS: Final[Mapping[str, IndexCodec]] = {"gaps": GapIndices()}
"""Index codecs by the names that options may use for them."""
