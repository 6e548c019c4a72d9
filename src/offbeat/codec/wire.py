"""The bytes of a sparse message.

    header   magic, version, formats, number of elements, number of coded entries, size of the tally
    tally    see `codec.tally`
    indices  one code for each entry
    values   one for each entry

All little-endian. Indices are coded by gaps in 2 bytes, with zero-valued fillers in gaps too large
for that, or plainly in 4 (8 for more than 2**32 elements): whichever is shorter. So a pair takes at
most 8 bytes with float32 values, 6 with bfloat16.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.codec import sparse_kernels
from offbeat.codec.jit import bits_of, magnitude_mask
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.errors import WireError

ValueFormat: TypeAlias = Literal["float32", "float64", "bfloat16"]
IndexFormat: TypeAlias = Literal["gap16", "plain32", "plain64"]
Values: TypeAlias = NDArray[np.generic]

MAGIC = b"OFBS"
VERSION = 1
_HEAD = struct.Struct("<4sBBBxQQI")

_VALUE_CODES: dict[ValueFormat, int] = {"float32": 0, "float64": 1, "bfloat16": 2}
_INDEX_CODES: dict[IndexFormat, int] = {"gap16": 0, "plain32": 1, "plain64": 2}
_VALUE_FORMATS = {code: name for name, code in _VALUE_CODES.items()}
_INDEX_FORMATS = {code: name for name, code in _INDEX_CODES.items()}

# little-endian like every machine that the kernels are compiled for
_VALUE_TYPES: dict[ValueFormat, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(np.uint16),
}
_INDEX_TYPES: dict[IndexFormat, np.dtype[np.unsignedinteger]] = {
    "gap16": np.dtype(np.uint16),
    "plain32": np.dtype(np.uint32),
    "plain64": np.dtype(np.uint64),
}


def pair_bytes(value_format: ValueFormat) -> int:
    """Bytes of an entry with a 2-byte gap, the usual form; gaps average less than 2**16 at any
    density above 1 / 2**16.
    """
    return _INDEX_TYPES["gap16"].itemsize + _VALUE_TYPES[value_format].itemsize


def encode(message: Sparse, tally: Tally, *, value_format: ValueFormat) -> tuple[bytes, Sparse]:
    """Lay a message out.

    Values beyond the range of `value_format` become its largest; entries that round to zero are
    left out.

    Args:
        message: what to send.
        tally: travels with it.
        value_format: of the values on the wire; the rounding is to nearest, ties to even.

    Returns:
        The payload, and the rounding error: message minus what `decode` will return.
    """
    wire_values, rounded = _to_wire(message.values, value_format)
    index_format, codes, wire_values = _to_codes(message, wire_values)
    counts = tally.to_bytes()
    formats = _VALUE_CODES[value_format], _INDEX_CODES[index_format]
    head = _HEAD.pack(MAGIC, VERSION, *formats, message.num_elements, codes.size, len(counts))
    return b"".join((head, counts, codes.data, wire_values.data)), _difference(message, rounded)


def decode(
    payload: bytes | bytearray | memoryview,
    *,
    num_elements: int,
    num_parameters: int,
    dtype: np.dtype[np.floating],
) -> tuple[Sparse, Tally]:
    """Read a message.

    Args:
        payload: from `encode`, or anything that reached this rank.
        num_elements: that the vector must have.
        num_parameters: that the tally must have.
        dtype: of the values to return, float32 or float64.

    Raises:
        WireError: the payload is no message, is damaged, or is of another version, bucket or model.
    """
    data = memoryview(payload).cast("B")
    if len(data) < _HEAD.size:
        raise WireError(
            f"a message of {len(data)} bytes is shorter than its header of {_HEAD.size}; it was"
            " truncated"
        )
    magic, version, value_code, index_code, size, count, tally_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise WireError(
            f"a message begins with {bytes(magic)!r} where {MAGIC!r} is expected; it is not one of"
            " offbeat's"
        )
    if version != VERSION:
        raise WireError(
            f"a message has version {version}, this is version {VERSION}; run the same offbeat on"
            " all ranks"
        )
    value_format, index_format = _VALUE_FORMATS.get(value_code), _INDEX_FORMATS.get(index_code)
    if value_format is None or index_format is None:
        raise WireError(
            f"a message has formats {(value_code, index_code)}, known are 0 to 2 each; it is"
            " damaged"
        )
    if size != num_elements:
        raise WireError(
            f"a message for {size} elements reached a bucket of {num_elements}; do all ranks train"
            " the same model?"
        )
    value_type, index_type = _VALUE_TYPES[value_format], _INDEX_TYPES[index_format]
    if value_format == "float64" and dtype != np.float64:
        raise WireError(
            f"a message has float64 values, this rank computes in {dtype}; do all ranks use the"
            " same dtype?"
        )
    expected = _HEAD.size + tally_bytes + count * (index_type.itemsize + value_type.itemsize)
    if expected != len(data):
        raise WireError(
            f"a message of {len(data)} bytes should have {expected} by its header; it was truncated"
            " or damaged"
        )
    tally = Tally.from_bytes(
        data[_HEAD.size : _HEAD.size + tally_bytes], num_parameters=num_parameters
    )
    if not 0 <= tally.weight < np.inf:
        raise WireError(
            f"a message has weight {tally.weight}, allowed are finite ones from 0 on; it is damaged"
        )
    at_indices = _HEAD.size + tally_bytes
    # copied, since inside a message they are not aligned
    codes = np.frombuffer(data, index_type, count, at_indices).copy()
    raw = np.frombuffer(data, value_type, count, at_indices + count * index_type.itemsize).copy()
    indices, raw = _from_codes(codes, raw, index_format, num_elements)
    values = _from_wire(raw, value_format).astype(dtype, copy=False)
    return Sparse(indices=indices, values=values, num_elements=num_elements), tally


def _difference(message: Sparse, rounded: NDArray[np.floating]) -> Sparse:
    if rounded is message.values:
        return Sparse.empty(message.num_elements, message.values.dtype)
    indices, errors = np.empty_like(message.indices), np.empty_like(message.values)
    count = sparse_kernels.differences(message.indices, message.values, rounded, indices, errors)
    return Sparse(indices=indices[:count], values=errors[:count], num_elements=message.num_elements)


def _to_codes(
    message: Sparse, values: Values
) -> tuple[IndexFormat, NDArray[np.unsignedinteger], Values]:
    """What is shortest: the index format, and codes and wire values of all entries whose value is
    not zero.
    """
    mask, bits = magnitude_mask(values.dtype), bits_of(values)
    plain: IndexFormat = "plain32" if message.num_elements <= 1 << 32 else "plain64"
    gap_bytes, plain_bytes = (
        _INDEX_TYPES[kind].itemsize + values.itemsize for kind in ("gap16", plain)
    )
    span = int(message.indices[-1]) + 1 if len(message) else 0
    room = min(len(message) + (span >> 16), len(message) * plain_bytes // gap_bytes)
    codes, coded = np.empty(room, dtype=np.uint16), np.empty(room, dtype=values.dtype)
    num_codes, num_entries = sparse_kernels.encode_gaps(
        message.indices, bits, mask, codes, bits_of(coded)
    )
    if 0 <= num_codes * gap_bytes <= num_entries * plain_bytes:
        return "gap16", codes[:num_codes], coded[:num_codes]
    sent = np.flatnonzero(bits & mask)
    return plain, message.indices[sent].astype(_INDEX_TYPES[plain]), values[sent]


def _from_codes(
    codes: NDArray[np.unsignedinteger], values: Values, index_format: IndexFormat, num_elements: int
) -> tuple[NDArray[np.int64], Values]:
    """Indices, checked to be strictly ascending and less than `num_elements`, and their values;
    zeros are left out.
    """
    mask, bits = magnitude_mask(values.dtype), bits_of(values)
    if index_format == "gap16":
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


def _to_wire(
    values: NDArray[np.floating], value_format: ValueFormat
) -> tuple[Values, NDArray[np.floating]]:
    """The values as they travel, and as they arrive in the dtype they had: `values` itself where
    nothing is lost.
    """
    if value_format == "bfloat16":
        codes = np.empty(values.size, dtype=np.uint16)
        sparse_kernels.round_to_bfloat16(values, codes)
        return codes, _from_wire(codes, value_format).astype(values.dtype, copy=False)
    wire_type = _VALUE_TYPES[value_format]
    if wire_type.itemsize < values.itemsize:
        on_wire = np.clip(values, -np.finfo(wire_type).max, np.finfo(wire_type).max).astype(
            wire_type
        )
        return on_wire, on_wire.astype(values.dtype)
    return values.astype(wire_type, copy=False), values


def _from_wire(raw: Values, value_format: ValueFormat) -> Values:
    if value_format == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw
