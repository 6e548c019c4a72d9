"""The bytes of a sparse message, and of several messages as one.

    header   magic, version, codecs, number of elements, number of values, size of the tally
    tally    see `codec.tally`
    indices  see `codec.index_codecs`
    values   see `codec.value_codecs`

All little-endian. A pair takes at most 8 bytes with float32 values, 6 with bfloat16 and 5 with
float8.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.codec import sparse
from offbeat.codec.arithmetic import CarriesCollectives, Message
from offbeat.codec.histogram import Histogram, histogram, quotas
from offbeat.codec.index_codecs import GapIndices, IndexCodec
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import Float32Values, ValueCodec
from offbeat.errors import WireError

MAGIC = b"OFBS"
VERSION = 1
_HEAD = struct.Struct("<4sBBBxQQI")
HEAD_BYTES = _HEAD.size


_LENGTH = struct.Struct("<Q")

LENGTH_BYTES: Final = _LENGTH.size
"""What a block takes besides its content."""


class ByteBlocks:
    """Several messages as one: each behind its length, 8 bytes, little-endian."""

    __slots__ = ()

    @staticmethod
    def join(blocks: Sequence[Message]) -> bytes:
        """One message of all of them.

        >>> ByteBlocks.split(ByteBlocks.join([b"ab", b""]), 2) == [b"ab", b""]
        True
        """
        return b"".join(part for block in blocks for part in (_LENGTH.pack(len(block)), block))

    @staticmethod
    def split(message: Message, count: int) -> list[Message]:
        """Inverse of `join`; copies nothing. Raises `WireError` unless `message` holds exactly
        `count` blocks.
        """
        view = memoryview(message)
        blocks: list[Message] = []
        for _ in range(count):
            if len(view) < _LENGTH.size:
                raise WireError(f"an all-gather message ends after {len(blocks)} of {count} blocks")
            (length,) = _LENGTH.unpack_from(view)
            view = view[_LENGTH.size :]
            if len(view) < length:
                raise WireError(f"an all-gather block of {length} bytes has only {len(view)}")
            blocks.append(view[:length])
            view = view[length:]
        if len(view):
            raise WireError(f"an all-gather message has {len(view)} bytes too many")
        return blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire(ByteBlocks, CarriesCollectives):
    """How the messages of one bucket are laid out, and the arithmetic of collectives
    (`codec.arithmetic`) with real entries.

    Attributes:
        num_elements: elements of the bucket.
        num_parameters: whose gradients the messages bring, the length of `Tally.used`.
        dtype: of the values in memory, float32 or float64.
        values: how values travel.
        indices: how indices travel.
    """

    num_elements: int
    num_parameters: int
    dtype: np.dtype[np.floating]
    values: ValueCodec = field(default_factory=Float32Values)
    indices: IndexCodec = field(default_factory=GapIndices)

    def empty(self) -> Sparse:
        """A vector without entries."""
        return Sparse.empty(self.num_elements, self.dtype)

    def encode(self, entries: Sparse, tally: Tally) -> tuple[bytes, Sparse]:
        """Lay a message out. Zeros are left out.

        Returns:
            The payload, and the rounding error: `entries` minus what `decode` will return.
        """
        if np.count_nonzero(entries.values) < len(entries):  # a sum may have cancelled
            entries = entries[entries.values != 0]
        on_wire = self.values.encode(entries.values)
        layout, coded = self.indices.encode(entries.indices, entries.num_elements)
        counts = tally.to_bytes()
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            self.values.code,
            layout,
            entries.num_elements,
            len(entries),
            len(counts),
        )
        payload = b"".join((head, counts, coded.data, on_wire.data))
        if self.values.is_exact_for(entries.values.dtype):
            return payload, Sparse.empty(entries.num_elements, entries.values.dtype)
        rounded = self.values.decode(on_wire.view(np.uint8), len(entries))
        return payload, _difference(entries, rounded.astype(entries.values.dtype, copy=False))

    def decode(self, payload: bytes | bytearray | memoryview) -> tuple[Sparse, Tally]:
        """Read a message: what `encode` wrote, or anything else that reached this rank.

        Raises:
            WireError: the payload is no message, is damaged, or is of another version, bucket,
                model or choice of codecs.
        """
        data = memoryview(payload).cast("B")
        if len(data) < _HEAD.size:
            raise WireError(
                f"a message of {len(data)} bytes is shorter than its header of {_HEAD.size}; it was"
                " truncated"
            )
        magic, version, code, layout, size, count, tally_bytes = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise WireError(
                f"a message begins with {bytes(magic)!r} where {MAGIC!r} is expected; it is not one"
                " of offbeat's"
            )
        if version != VERSION:
            raise WireError(
                f"a message has version {version}, this is version {VERSION}; run the same offbeat"
                " on all ranks"
            )
        if code != self.values.code:
            raise WireError(
                f"a message has value codec {code}, this rank reads {self.values.code},"
                f" {self.values!r}; it is damaged, or the ranks use different dtypes or options"
            )
        if size != self.num_elements:
            raise WireError(
                f"a message for {size} elements reached a bucket of {self.num_elements}; do all"
                " ranks train the same model?"
            )
        at_indices = _HEAD.size + tally_bytes
        at_values = len(data) - int(self.values.num_bytes(count))
        if at_values < at_indices:
            raise WireError(
                f"a message of {len(data)} bytes should have {at_indices - at_values} more by its"
                " header; it was truncated or damaged"
            )
        tally = Tally.from_bytes(data[_HEAD.size : at_indices], num_parameters=self.num_parameters)
        # Copied, because inside a message they are not aligned.
        coded, on_wire = (
            np.frombuffer(part, np.uint8).copy()
            for part in (data[at_indices:at_values], data[at_values:])
        )
        indices = self.indices.decode(layout, coded, count, self.num_elements)
        if indices.size and not (
            indices[0] >= 0 and indices[-1] < self.num_elements and (np.diff(indices) > 0).all()
        ):
            raise WireError(
                f"a message has indices from {indices[0]} to {indices[-1]}, allowed are ascending"
                f" ones below {self.num_elements}; it is damaged"
            )
        with np.errstate(over="ignore"):  # what is damaged may be too large for float32
            values = self.values.decode(on_wire, count).astype(self.dtype, copy=False)
        return Sparse(indices=indices, values=values, num_elements=self.num_elements), tally

    def count_magnitudes(self, sums: Sparse, k: int, world_size: int) -> bytes:
        return histogram(sums, k, world_size).to_bytes()

    add = staticmethod(sparse.add)
    add_all = staticmethod(sparse.add_all)
    clip_to_median = staticmethod(sparse.clip_to_median)
    keep_largest = staticmethod(sparse.keep_largest)
    partition = staticmethod(sparse.partition)
    split_common = staticmethod(sparse.split_common)
    union_disjoint = staticmethod(sparse.union_disjoint)
    read_counts = staticmethod(Histogram.from_bytes)
    quotas = staticmethod(quotas)


def pair_bytes(values: ValueCodec, indices: IndexCodec, *, k: int, num_elements: int) -> float:
    """Bytes of an entry in a usual message, for estimates of cost.

    Args:
        values, indices: how they travel.
        k: entries of the message, >= 1.
        num_elements: length of the vector.
    """
    return (indices.expected_bytes(k, num_elements) + values.num_bytes(k)) / k


def _difference(entries: Sparse, rounded: NDArray[np.floating]) -> Sparse:
    """What is not zero of it; a NaN has no difference from anything."""
    with np.errstate(invalid="ignore"):  # of two infinities
        errors = entries.values - rounded
    return replace(entries, values=errors)[np.abs(errors) > 0]
