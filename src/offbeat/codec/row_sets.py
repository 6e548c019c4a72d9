"""Which rows of a matrix, in as few bytes as a list of numbers or a bit for each row takes.

Layout: one byte that says which, then numbers (u32, little-endian, ascending) or bits.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import WireError

RowSet: TypeAlias = NDArray[np.bool_]
"""For each row whether it is in, shape (rows,)."""

_LIST, _BITS = b"l", b"b"
_INDEX = np.dtype("<u4")


def encode_rows(rows: RowSet) -> bytes:
    numbers = np.flatnonzero(rows)
    if numbers.size * _INDEX.itemsize < -(-rows.size // 8):
        return _LIST + numbers.astype(_INDEX).tobytes()
    return _BITS + np.packbits(rows).tobytes()


def decode_rows(payload: bytes | memoryview, num_rows: int) -> RowSet:
    """Inverse of `encode_rows`. Raises `WireError` for what is no set of so many rows."""
    kind, body = bytes(payload[:1]), payload[1:]
    if kind == _BITS and len(body) == -(-num_rows // 8):
        return np.unpackbits(np.frombuffer(body, np.uint8), count=num_rows).astype(np.bool_)
    if kind == _LIST and len(body) % _INDEX.itemsize == 0:
        numbers = np.frombuffer(body, _INDEX)
        if not numbers.size or int(numbers.max()) < num_rows:
            rows = np.zeros(num_rows, np.bool_)
            rows[numbers] = True
            return rows
    raise WireError(
        f"a set of {num_rows} rows came as {len(payload)} bytes of kind {kind!r}; do all ranks"
        " train the same model?"
    )
