"""Sets of rows on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.index_codecs import decode_rows, encode_rows
from offbeat.errors import WireError
from offbeat.megabatch.merge import index_bytes


@given(st.integers(1, 300), st.data())
def test_a_set_comes_back_in_as_few_bytes_as_planned(num_rows: int, data: st.DataObject) -> None:
    rows = np.zeros(num_rows, np.bool_)
    rows[data.draw(st.lists(st.integers(0, num_rows - 1)))] = True
    encoded = encode_rows(rows)
    np.testing.assert_array_equal(decode_rows(encoded, num_rows), rows)
    assert len(encoded) == 1 + index_bytes(int(rows.sum()), num_rows)


@pytest.mark.parametrize(
    "payload", [b"", b"x", b"b\x00", b"l\x00", b"l\x09\x00\x00\x00", b"b\x00\x00\x00"]
)
def test_what_is_no_set_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="a set of 9 rows"):
        decode_rows(payload, 9)
