"""The bytes of a sparse message.

    header   magic, version, formats, number of elements, number of coded entries, size of the tally
    tally    see `codec.tally`
    indices  one code for each entry
    values   one for each entry

All little-endian. Indices are coded by gaps in 2 bytes, with zero-valued fillers in gaps too large for that, or plainly in 4 (8
for more than 2**32 elements): whichever is shorter. So a pair takes at most 8 bytes with float32 values, 6 with bfloat16.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.codec import kernels
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.errors import WireError

ValueFormat: TypeAlias = Literal["float32", "float64", "bfloat16"]
IndexFormat: TypeAlias = Literal["gap16", "plain32", "plain64"]

MAGIC = b"OFBS"
VERSION = 1
_HEAD = struct.Struct("<4sBBBxQQI")

_VALUE_CODES: dict[ValueFormat, int] = {"float32": 0, "float64": 1, "bfloat16": 2}
_VALUE_TYPES: dict[ValueFormat, str] = {"float32": "<f4", "float64": "<f8", "bfloat16": "<u2"}
_INDEX_CODES: dict[IndexFormat, int] = {"gap16": 0, "plain32": 1, "plain64": 2}
_INDEX_TYPES: dict[IndexFormat, str] = {"gap16": "<u2", "plain32": "<u4", "plain64": "<u8"}
_VALUE_FORMATS = {code: name for name, code in _VALUE_CODES.items()}
_INDEX_FORMATS = {code: name for name, code in _INDEX_CODES.items()}

_BFLOAT16_MAX = float(np.array(0x7F7F0000, dtype=np.uint32).view(np.float32))
_BFLOAT16_NAN = 0x7FC0


def pair_bytes(value_format: ValueFormat) -> int:
    """Bytes of an entry with a 2-byte gap, the usual form; gaps average less than 2**16 at any density above 1 / 2**16."""
    return 2 + _num_bytes(_VALUE_TYPES[value_format])


def encode(message: Sparse, tally: Tally, *, value_format: ValueFormat) -> tuple[bytes, Sparse]:
    """Lay a message out.

    Values beyond the range of `value_format` become its largest; entries that round to zero are left out.

    Args:
        message: what to send.
        tally: travels with it.
        value_format: of the values on the wire; the rounding is to nearest, ties to even.

    Returns:
        The payload, and the rounding error: message minus what `decode` will return.
    """
    wire_values, rounded = _to_wire(message.values, value_format)
    rounding = _difference(message, rounded)
    sent = rounded != 0
    indices, wire_values = message.indices[sent], wire_values[sent]
    index_format = _shortest(indices, message.num_elements, wire_values.itemsize)
    if index_format == "gap16":
        codes, wire_values = _to_gaps(indices, wire_values)
    else:
        codes = indices
    counts = tally.to_bytes()
    formats = _VALUE_CODES[value_format], _INDEX_CODES[index_format]
    head = _HEAD.pack(MAGIC, VERSION, *formats, message.num_elements, codes.size, len(counts))
    return b"".join((head, counts, codes.astype(_INDEX_TYPES[index_format]).tobytes(), wire_values.tobytes())), rounding


def decode(
    payload: bytes | bytearray | memoryview, *, num_elements: int, num_parameters: int, dtype: np.dtype[np.floating]
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
        raise WireError(f"a message of {len(data)} bytes is shorter than its header of {_HEAD.size}; it was truncated")
    magic, version, value_code, index_code, size, count, tally_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"a message begins with {bytes(magic)!r} where {MAGIC!r} is expected; it is not one of offbeat's")
    if version != VERSION:
        raise WireError(f"a message has version {version}, this is version {VERSION}; run the same offbeat on all ranks")
    value_format, index_format = _VALUE_FORMATS.get(value_code), _INDEX_FORMATS.get(index_code)
    if value_format is None or index_format is None:
        raise WireError(f"a message has formats {(value_code, index_code)}, known are 0 to 2 each; it is damaged")
    if size != num_elements:
        raise WireError(f"a message for {size} elements reached a bucket of {num_elements}; do all ranks train the same model?")
    value_type, index_type = np.dtype(_VALUE_TYPES[value_format]), np.dtype(_INDEX_TYPES[index_format])
    if value_format == "float64" and dtype != np.float64:
        raise WireError(f"a message has float64 values, this rank computes in {dtype}; do all ranks use the same dtype?")
    expected = _HEAD.size + tally_bytes + count * (index_type.itemsize + value_type.itemsize)
    if expected != len(data):
        raise WireError(f"a message of {len(data)} bytes should have {expected} by its header; it was truncated or damaged")
    tally = Tally.from_bytes(data[_HEAD.size : _HEAD.size + tally_bytes], num_parameters=num_parameters)
    if not 0 <= tally.weight < np.inf:
        raise WireError(f"a message has weight {tally.weight}, allowed are finite ones from 0 on; it is damaged")
    at_indices = _HEAD.size + tally_bytes
    indices = _from_codes(np.frombuffer(data, index_type, count, at_indices), index_format, num_elements)
    raw = np.frombuffer(data, value_type, count, at_indices + count * index_type.itemsize)
    values = _from_wire(raw, value_format).astype(dtype)
    sparse = Sparse(indices=indices, values=values, num_elements=num_elements)
    return sparse.where(values != 0), tally


def _difference(message: Sparse, rounded: NDArray[np.floating]) -> Sparse:
    differs = (message.values != rounded) & ~np.isnan(message.values)
    if not differs.any():
        return Sparse.empty(message.num_elements, message.values.dtype)
    errors = message.values[differs] - rounded[differs]
    return Sparse(indices=message.indices[differs], values=errors, num_elements=message.num_elements)


def _num_bytes(kind: str) -> int:
    return np.dtype(kind).itemsize


def _shortest(indices: NDArray[np.int64], num_elements: int, value_bytes: int) -> IndexFormat:
    plain: IndexFormat = "plain32" if num_elements <= 1 << 32 else "plain64"
    plain_bytes = indices.size * (_num_bytes(_INDEX_TYPES[plain]) + value_bytes)
    return "gap16" if _num_gap_codes(indices) * (2 + value_bytes) <= plain_bytes else plain


def _num_gap_codes(indices: NDArray[np.int64]) -> int:
    """Entries, and one filler for each full 2**16 of a gap."""
    return indices.size + int((np.diff(indices, prepend=-1) - 1 >> 16).sum())


def _to_gaps(indices: NDArray[np.int64], values: NDArray[np.generic]) -> tuple[NDArray[np.uint16], NDArray[np.generic]]:
    codes = np.empty(_num_gap_codes(indices), dtype=np.uint16)
    if codes.size == indices.size:
        return (np.diff(indices, prepend=-1) - 1).astype(np.uint16), values
    places = np.empty(indices.size, dtype=np.int64)
    kernels.gap_codes(indices, codes, places)
    spread = np.zeros(codes.size, dtype=values.dtype)
    spread[places] = values
    return codes, spread


def _from_codes(codes: NDArray[np.unsignedinteger], index_format: IndexFormat, num_elements: int) -> NDArray[np.int64]:
    """Indices, checked to be strictly ascending and less than `num_elements`."""
    if index_format == "gap16":
        indices = np.cumsum(codes.astype(np.int64) + 1) - 1
    else:
        indices = codes.astype(np.int64)
        if (indices[1:] <= indices[:-1]).any() or (indices.size and indices[0] < 0):
            raise WireError("the indices of a message do not ascend; it is damaged")
    if indices.size and indices[-1] >= num_elements:
        raise WireError(f"a message has index {indices[-1]}, allowed are those below {num_elements}; it is damaged")
    return indices


def _to_wire(values: NDArray[np.floating], value_format: ValueFormat) -> tuple[NDArray[np.generic], NDArray[np.floating]]:
    """The values as they travel, and as they arrive in the dtype they had."""
    if value_format == "bfloat16":
        codes = _bfloat16_codes(values)
        return codes, _from_wire(codes, value_format).astype(values.dtype)
    wire_type = np.dtype(_VALUE_TYPES[value_format])
    if wire_type.itemsize < values.itemsize:
        values = np.clip(values, -np.finfo(wire_type).max, np.finfo(wire_type).max)
    on_wire = values.astype(wire_type)
    return on_wire, on_wire.astype(values.dtype)


def _bfloat16_codes(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Leading halves of the float32 numbers, rounded to nearest, ties to even (float64 is rounded to float32 first)."""
    single = np.clip(values, -_BFLOAT16_MAX, _BFLOAT16_MAX).astype(np.float32)
    bits = single.view(np.uint32)
    codes: NDArray[np.uint16] = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    codes[np.isnan(single)] = _BFLOAT16_NAN  # whose bits may have overflowed
    return codes


def _from_wire(raw: NDArray[np.generic], value_format: ValueFormat) -> NDArray[np.generic]:
    if value_format == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw
