"""Bytes of a packed merge against those of a dense one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offbeat.megabatch.row_packing import index_bytes, packs

shapes = st.tuples(st.integers(1, 500), st.sampled_from([4, 64, 512]))


def sent(num_ranks: int, num_values_bytes: float, lists: int = 0) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_values_bytes + (num_ranks - 1) * lists


@given(shapes, st.data())
def test_what_is_packed_costs_at_most_the_lists_more(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    num_rows, row_bytes = shape
    touched = data.draw(st.lists(st.integers(0, num_rows), min_size=1, max_size=6))
    lists = max(index_bytes(count, num_rows) for count in touched)
    dense = sent(len(touched), num_rows * row_bytes)
    if packs(touched, num_rows=num_rows, row_bytes=row_bytes):
        assert sent(len(touched), max(touched) * row_bytes, lists) < dense
        assert (
            sent(len(touched), min(sum(touched), num_rows) * row_bytes, lists)
            <= dense + (len(touched) - 1) * lists
        )
    else:
        assert sent(len(touched), max(touched) * row_bytes, lists) >= dense


@given(st.integers(1, 5000), st.data())
def test_a_set_of_rows_is_no_longer_than_a_bit_for_each(num_rows: int, data: st.DataObject) -> None:
    assert index_bytes(data.draw(st.integers(0, num_rows)), num_rows) <= -(-num_rows // 8)
