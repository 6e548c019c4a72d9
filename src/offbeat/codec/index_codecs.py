"""How the indices of a sparse message travel: an `IndexCodec`, chosen by value in a strategy's
options.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.few_bits import pack, unpack
from offbeat.codec.option_value import OptionValue
from offbeat.errors import WireError


class CodedIndices(NamedTuple):
    """The indices of a message.

    Attributes:
        layout: a byte that says how `coded` is to be read.
        coded: contiguous, of any dtype and size.
    """

    layout: int
    coded: NDArray[np.generic]


class IndexCodec(OptionValue):
    """Turns ascending indices into bytes and back."""

    usual_bytes: ClassVar[float]
    """Bytes of an index in a usual message, for `expected_bytes` as it stands here."""

    def expected_bytes(self, num_pairs: float, num_elements: int) -> float:
        """How many bytes the indices of a message are expected to take.

        Args:
            num_pairs: entries, at random places.
            num_elements: length of the vector.
        """
        return num_pairs * self.usual_bytes

    @abstractmethod
    def encode(self, indices: NDArray[np.int64], num_elements: int) -> CodedIndices:
        """Code `indices`.

        Args:
            indices: strictly ascending, in [0, num_elements).
            num_elements: length of the vector.
        """

    @abstractmethod
    def decode(
        self, layout: int, coded: NDArray[np.uint8], count: int, num_elements: int
    ) -> NDArray[np.int64]:
        """Inverse of `encode`.

        Args:
            layout: as received.
            coded: all bytes of the message that are there for indices; this array owns them.
            count: how many indices they must be.
            num_elements: length of the vector.

        Returns:
            `count` indices. The caller looks whether they ascend and are in [0, num_elements).

        Raises:
            WireError: a layout that is not this codec's, or not so many indices.
        """


class GapIndices(IndexCodec):
    """Gaps between indices in 1 or in 2 bytes or as Rice codes, or a bit for each element of the
    vector, or plain indices in 4 bytes (8 for more than 2**32 elements), or nothing where all
    elements are there: whichever is shortest.

    A gap too large for its bytes is bridged by further codes. Rice codes take less than 3% more
    than the entropy of indices at random places: 8.1 bits an index at a density of 0.01, 11.4 at
    0.001. Reading them takes longer than reading bytes, so they have to save an eighth.
    """

    _GAPS, _PLAIN_32, _PLAIN_64, _SHORT_GAPS, _BITMAP, _ALL, _RICE = range(7)
    _DTYPES: ClassVar[Mapping[int, np.dtype[np.unsignedinteger]]] = {
        _GAPS: np.dtype(np.uint16),
        _PLAIN_32: np.dtype(np.uint32),
        _PLAIN_64: np.dtype(np.uint64),
        _SHORT_GAPS: np.dtype(np.uint8),
    }

    @override
    def expected_bytes(self, num_pairs: float, num_elements: int) -> float:
        if num_pairs <= 0 or num_pairs >= num_elements:
            return 0.0

        def with_gaps(layout: int) -> float:
            # Of gaps with a geometric distribution a share of `beyond` is longer than a code can
            # say, and each time it is one more code is needed.
            code_bytes = self._DTYPES[layout].itemsize
            longest = (1 << 8 * code_bytes) - 1
            beyond = math.exp(-min(700.0, longest * num_pairs / num_elements))
            return num_pairs * code_bytes / (1 - beyond) if beyond < 1 else math.inf

        shortest = min(
            with_gaps(self._SHORT_GAPS),
            with_gaps(self._GAPS),
            num_pairs * self._DTYPES[self._plain(num_elements)].itemsize,
            num_elements / 8,
        )
        shift = _rice_shift(num_pairs, num_elements)
        # Of gaps with a geometric distribution, the mean number of whole 2**shift in them.
        upper = 1 / math.expm1(num_pairs / num_elements * (1 << shift))
        rice = 1 + num_pairs * (1 + shift + upper) / 8
        return rice if _is_worth(rice, shortest) else shortest

    @override
    def encode(self, indices: NDArray[np.int64], num_elements: int) -> CodedIndices:
        if indices.size == num_elements:
            return CodedIndices(self._ALL, np.empty(0, np.uint8))
        gaps = np.diff(indices, prepend=-1) - 1
        plain = self._plain(num_elements)
        counts = {
            layout: gaps.size + int((gaps // np.iinfo(self._DTYPES[layout]).max).sum())
            for layout in (self._SHORT_GAPS, self._GAPS)
        }
        counts[plain] = gaps.size
        total_bytes = {
            layout: count * self._DTYPES[layout].itemsize for layout, count in counts.items()
        }
        total_bytes[self._BITMAP] = -(-num_elements // 8)
        layout = min(total_bytes, key=total_bytes.__getitem__)
        shift = _rice_shift(gaps.size, num_elements)
        lower_bytes = -(-gaps.size * shift // 8)
        if _is_worth(1 + lower_bytes + gaps.size / 8, total_bytes[layout]):
            upper_bytes = -(-(gaps.size + int((gaps >> shift).sum())) // 8)
            if _is_worth(1 + lower_bytes + upper_bytes, total_bytes[layout]):
                return CodedIndices(self._RICE, _rice(gaps, shift, upper_bytes))
        if layout == self._BITMAP:
            is_sent = np.zeros(num_elements, dtype=np.bool_)
            is_sent[indices] = True
            return CodedIndices(layout, np.packbits(is_sent, bitorder="little"))
        if layout == plain:
            return CodedIndices(layout, indices.astype(self._DTYPES[plain]))
        # The largest code stands for so many elements without an entry, the others for as many and
        # an entry behind them.
        longest = np.iinfo(self._DTYPES[layout]).max
        bridges = gaps // longest
        codes = np.full(counts[layout], longest, dtype=self._DTYPES[layout])
        codes[np.cumsum(bridges + 1) - 1] = gaps - longest * bridges
        return CodedIndices(layout, codes)

    @override
    def decode(
        self, layout: int, coded: NDArray[np.uint8], count: int, num_elements: int
    ) -> NDArray[np.int64]:
        if layout == self._BITMAP:
            _require_count(coded.size, -(-num_elements // 8), "bytes of a bitmap")
            indices = np.flatnonzero(np.unpackbits(coded, bitorder="little"))
        elif layout == self._ALL:
            _require_count(coded.size, 0, "bytes of indices")
            _require_count(count, num_elements, "values")  # before there is memory for as many
            indices = np.arange(num_elements)
        elif layout == self._RICE:
            indices = _from_rice(coded, count)
        elif layout in self._DTYPES:
            dtype = self._DTYPES[layout]
            _require_count(coded.size % dtype.itemsize, 0, "bytes beyond whole indices")
            indices = codes = coded.view(dtype).astype(np.int64)
            if layout in (self._SHORT_GAPS, self._GAPS):
                brings_entry = codes < np.iinfo(dtype).max
                _require_count(int(brings_entry[-1:].all()), 1, "entries behind its last gap")
                indices = (np.cumsum(codes + brings_entry) - 1)[brings_entry]
        else:
            raise WireError(
                f"a message has index layout {layout}, this version reads 0 to {self._RICE}; run"
                " the same offbeat with the same options on all ranks"
            )
        _require_count(indices.size, count, "indices")
        return indices

    def _plain(self, num_elements: int) -> int:
        """The layout of plain indices."""
        return self._PLAIN_32 if num_elements <= 1 << 32 else self._PLAIN_64


def _rice_shift(num_pairs: float, num_elements: int) -> int:
    """How many bits of a gap are lower ones: log2 of ln 2 times the mean gap, which is nearly best
    for a geometric distribution.
    """
    mean = num_elements / num_pairs if num_pairs else 1.0
    return min(31, max(0, round(math.log2(mean * math.log(2)))))


def _is_worth(rice_bytes: float, shortest_bytes: float) -> bool:
    return rice_bytes < 0.875 * shortest_bytes


def _rice(gaps: NDArray[np.int64], shift: int, upper_bytes: int) -> NDArray[np.uint8]:
    """Golomb's codes, with a power of two: the shift; the lower bits of all gaps as they are; and
    the upper bits of each as so many zeros and a one.
    """
    is_one = np.zeros(8 * upper_bytes, dtype=np.bool_)
    is_one[np.cumsum((gaps >> shift) + 1) - 1] = True
    lower = (gaps & (1 << shift) - 1).astype(np.uint32)
    head = np.array([shift], dtype=np.uint8)
    return np.concatenate([head, pack(lower, shift), np.packbits(is_one, bitorder="little")])


def _from_rice(coded: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    shift = int(coded[0]) if coded.size else 32
    at_upper = 1 + -(-count * shift // 8)
    if shift > 31 or coded.size <= at_upper or not coded[-1]:  # whose last bit is an index's
        raise WireError(
            f"Rice codes of {count} indices cannot be {coded.size} bytes; the message was truncated"
            " or damaged"
        )
    ones = np.flatnonzero(np.unpackbits(coded[at_upper:], bitorder="little"))
    _require_count(ones.size, count, "indices")
    upper = np.diff(ones, prepend=-1) - 1
    return np.cumsum((upper << shift) + unpack(coded[1:at_upper], shift, count) + 1) - 1


def _require_count(found: int, expected: int, of: str) -> None:
    if found != expected:
        raise WireError(
            f"a message has {found} {of} where it should have {expected}; it was truncated or"
            " damaged"
        )


INDEX_CODECS: Final[Mapping[str, IndexCodec]] = {"gaps": GapIndices()}
"""Index codecs by the names that options may use for them."""


RowSet: TypeAlias = NDArray[np.bool_]
"""For each row whether it is in, shape (rows,)."""

_ROW_NUMBERS, _ROW_BITS = b"l", b"b"
_ROW_NUMBER = np.dtype("<u4")


def encode_rows(rows: RowSet) -> bytes:
    """Which rows of a matrix, in as few bytes as a list of numbers or a bit for each row takes.

    Layout: one byte that says which, then numbers (u32, little-endian, ascending) or bits.
    """
    numbers = np.flatnonzero(rows)
    if numbers.size * _ROW_NUMBER.itemsize < -(-rows.size // 8):
        return _ROW_NUMBERS + numbers.astype(_ROW_NUMBER).tobytes()
    return _ROW_BITS + np.packbits(rows).tobytes()


def decode_rows(payload: bytes | memoryview, num_rows: int) -> RowSet:
    """Inverse of `encode_rows`. Raises `WireError` for what is no set of so many rows."""
    kind, body = bytes(payload[:1]), payload[1:]
    if kind == _ROW_BITS and len(body) == -(-num_rows // 8):
        return np.unpackbits(np.frombuffer(body, np.uint8), count=num_rows).astype(np.bool_)
    if kind == _ROW_NUMBERS and len(body) % _ROW_NUMBER.itemsize == 0:
        numbers = np.frombuffer(body, _ROW_NUMBER)
        if not numbers.size or int(numbers.max()) < num_rows:
            rows = np.zeros(num_rows, np.bool_)
            rows[numbers] = True
            return rows
    raise WireError(
        f"a set of {num_rows} rows came as {len(payload)} bytes of kind {kind!r}; do all ranks"
        " train the same model?"
    )
