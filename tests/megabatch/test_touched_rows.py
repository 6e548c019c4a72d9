"""Which rows have changed, and the bytes of a merge of some rows against those of a dense one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.megabatch.merge import index_bytes, rows_are_cheaper, touched_rows

shapes = st.tuples(st.integers(1, 500), st.sampled_from([4, 64, 512]))


def sent(num_ranks: int, num_values_bytes: float, sets: int = 0) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_values_bytes + (num_ranks - 1) * sets


@given(shapes, st.data())
def test_merging_some_rows_costs_at_most_the_sets_more(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    num_rows, row_bytes = shape
    touched = data.draw(st.lists(st.integers(0, num_rows), min_size=1, max_size=6))
    sets = max(index_bytes(count, num_rows) for count in touched)
    dense = sent(len(touched), num_rows * row_bytes)
    if rows_are_cheaper(touched, num_rows=num_rows, row_bytes=row_bytes):
        assert sent(len(touched), max(touched) * row_bytes, sets) < dense
        assert (
            sent(len(touched), min(sum(touched), num_rows) * row_bytes, sets)
            <= dense + (len(touched) - 1) * sets
        )
    else:
        assert sent(len(touched), max(touched) * row_bytes, sets) >= dense


@given(st.integers(1, 5000), st.data())
def test_a_set_of_rows_is_no_longer_than_a_bit_for_each(num_rows: int, data: st.DataObject) -> None:
    assert index_bytes(data.draw(st.integers(0, num_rows)), num_rows) <= -(-num_rows // 8)


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_has_changed_where_its_bits_have(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    then = torch.zeros(shape, dtype=dtype)
    if len(then):
        then[3] = torch.nan
    now = then.clone()
    for row, value in enumerate((1.0, -0.0)[: len(then)]):
        now[row].view(-1)[-1] = value
    (rows,) = touched_rows({4: then}, [now] * 5).values()
    assert rows.tolist() == [True, True, False, False, False, False][: len(then)]
