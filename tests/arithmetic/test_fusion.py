"""Fusion covers every parameter once, keeps kinds apart and respects the cap; ownership is
balanced.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.arithmetic.fusion import OWNER_BLOCK, fuse, owner_of

parameters = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), min_size=1, max_size=40)


@given(parameters, st.integers(1, 100), st.integers(1, 100))
def test_every_parameter_is_in_exactly_one_bucket(
    drawn: list[tuple[int, str]], cap: int, first_cap: int
) -> None:
    buckets = fuse(
        [size for size, _ in drawn],
        [kind for _, kind in drawn],
        cap_bytes=cap,
        first_cap_bytes=first_cap,
    )
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(drawn)))


@given(parameters, st.integers(1, 100))
def test_a_bucket_holds_one_kind_and_exceeds_the_cap_only_with_a_single_parameter(
    drawn: list[tuple[int, str]], cap: int
) -> None:
    sizes = [size for size, _ in drawn]
    for bucket in fuse(sizes, [kind for _, kind in drawn], cap_bytes=cap):
        assert len({drawn[index][1] for index in bucket}) == 1
        filled = sum(sizes[index] for index in bucket)
        assert filled <= cap or sum(sizes[index] > 0 for index in bucket) == 1


@given(parameters)
def test_without_a_cap_there_is_one_bucket_a_kind(drawn: list[tuple[int, str]]) -> None:
    buckets = fuse([size for size, _ in drawn], [kind for _, kind in drawn], cap_bytes=None)
    assert len(buckets) == len({kind for _, kind in drawn})


def test_later_parameters_come_first() -> None:
    assert fuse([4, 4, 4, 4], ["f32"] * 4, cap_bytes=8) == [[3, 2], [1, 0]]


def test_the_first_bucket_may_be_smaller() -> None:
    assert fuse([4, 4, 4, 4], ["f32"] * 4, cap_bytes=12, first_cap_bytes=4) == [[3], [2, 1, 0]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
def test_owners_of_any_long_range_have_equal_shares(world_size: int) -> None:
    start, length = 12345, 100 * OWNER_BLOCK * world_size
    owned = np.bincount(
        owner_of(np.arange(start, start + length), world_size), minlength=world_size
    )
    assert owned.max() - owned.min() <= OWNER_BLOCK
