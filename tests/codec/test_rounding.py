"""Vectors of which all but some elements are rounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.rounding import Rounding, add_rounded, move_by_rounded

numbers = st.floats(-1e30, 1e30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    values=st.lists(numbers, min_size=12, max_size=12),
    begin=st.integers(0, 12),
    size=st.integers(0, 12),
    first=st.integers(0, 12),
    second=st.integers(0, 12),
)
def test_a_range_keeps_its_exact_elements_and_half_a_bfloat16_of_the_others(
    dtype: type[np.floating], values: list[float], begin: int, size: int, first: int, second: int
) -> None:
    rounding = Rounding((slice(min(first, 4), 4), slice(7, max(second, 7))))
    whole = np.array(values, dtype)
    part = whole[begin : begin + size]
    codes, exact = rounding.encode(part, begin)
    read = rounding.decode((codes, exact), begin)
    assert codes.size == part.size
    assert exact.size == rounding.num_exact(begin, begin + part.size)
    assert read.dtype == dtype
    np.testing.assert_allclose(read, part, rtol=2**-8, atol=1e-37)
    is_exact = np.isin(np.arange(12), np.r_[rounding.exact])[begin : begin + size]
    np.testing.assert_array_equal(read[is_exact], part[is_exact])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(rows=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=9))
def test_rounded_values_are_added_and_subtracted_as_the_numbers_that_they_are(
    dtype: type[np.floating], rows: list[tuple[float, float, float]]
) -> None:
    mine, *others = np.array(rows, dtype).T
    (first, one), (second, two) = (
        (codes, Rounding().decode((codes, exact), 0))
        for codes, exact in (Rounding().encode(other, 0) for other in others)
    )
    moved = np.empty_like(mine)
    move_by_rounded(mine, first, second, moved)
    np.testing.assert_array_equal(
        moved, mine + (one.astype(np.float32) - two.astype(np.float32)).astype(dtype)
    )
    total = mine.copy()
    add_rounded(total, first, dtype(2))
    np.testing.assert_allclose(total, mine + 2 * one, rtol=1e-6)
