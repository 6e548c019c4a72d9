"""Rotating groups: everyone is in just one, nobody is alone, and a few versions connect all."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.arithmetic.groups import VersionGroup, group_of_version, groups, num_groups

WORLD_SIZES = [*range(1, 34), 63, 64, 65, 100, 255, 256, 1000, 1023, 1024]
GROUP_SIZES = [2, 3, 4, 5, 8, 10, 16, 32, 100]

worlds = st.lists(st.integers(0, 5000), min_size=1, max_size=40, unique=True)


@given(st.integers(0, 10**9), worlds, st.integers(2, 50))
def test_groups_are_disjoint_cover_everyone_and_keep_the_members_order(
    version: int, members: list[int], size: int
) -> None:
    found = groups(version, members, size)
    assert sorted(rank for group in found for rank in group) == sorted(members)
    assert all(list(group) == [rank for rank in members if rank in group] for group in found)


def test_groups_are_balanced_no_larger_than_asked_and_nobody_is_alone() -> None:
    for world_size, size in product(WORLD_SIZES, GROUP_SIZES):
        for version in range(3):
            sizes = {len(group) for group in groups(version, range(world_size), size)}
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= min(2, world_size)
            assert max(sizes) <= (3 if size == 2 and world_size % 2 else size)


def versions_until_all_are_connected(first: int, world_size: int, size: int) -> int:
    """How many versions it takes until everyone's model has something of everyone's."""
    reached = np.eye(world_size, dtype=bool)
    version = first
    while not reached.all():
        for group in groups(version, range(world_size), size):
            reached[list(group)] = reached[list(group)].any(axis=0)
        version += 1
    return version - first


def test_everyone_is_connected_within_the_logarithm_and_one() -> None:
    for world_size, size in product(WORLD_SIZES, GROUP_SIZES):
        bound = math.ceil(math.log(world_size) / math.log(size) - 1e-9)
        is_butterfly = world_size & (world_size - 1) == 0 and size & (size - 1) == 0
        for first in (0, 1, 7):
            assert versions_until_all_are_connected(first, world_size, size) <= bound + (
                not is_butterfly
            )


def test_the_papers_example() -> None:
    assert groups(0, range(8), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(1, range(8), 4) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize("world_size", [4, 8, 16, 64])
def test_partners_of_a_butterfly_differ_in_as_many_bits_as_the_group_has(world_size: int) -> None:
    for version in range(7):
        for group in groups(version, range(world_size), 4):
            free = np.bitwise_or.reduce([rank ^ group[0] for rank in group])
            assert int(free).bit_count() == 2


def test_exact_averaging_in_full_turns_reaches_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=64)
    averaged = values.copy()
    for version in range(5, 8):
        for group in groups(version, range(64), 4):
            averaged[list(group)] = averaged[list(group)].mean()
    np.testing.assert_allclose(averaged, values.mean())


def test_a_group_as_large_as_the_world_is_everyone() -> None:
    assert groups(3, [5, 7, 9], 3) == groups(3, [5, 7, 9], 100) == [(5, 7, 9)]
    assert groups(3, [5], 2) == [(5,)]


@given(st.integers(1, 500), st.integers(2, 600))
def test_the_number_of_groups_is_the_one_announced(world_size: int, size: int) -> None:
    assert len(groups(1, range(world_size), size)) == num_groups(world_size, size)


@given(st.integers(0, 1000), worlds, st.integers(2, 9), st.integers(1, 12), st.floats(0.01, 1.0))
def test_members_of_a_group_agree_on_it(
    version: int, members: list[int], size: int, period: int, quorum: float
) -> None:
    found_groups = {
        rank: group_of_version(
            version, rank, members, group_size=size, period=period, quorum=quorum
        )
        for rank in members
    }
    for rank, found in found_groups.items():
        assert rank in found.ranks
        assert all(found_groups[other] == found for other in found.ranks)
    if (version + 1) % period == 0:
        everyone = VersionGroup(
            ranks=tuple(members), min_arrivals=found_groups[members[0]].min_arrivals
        )
        assert set(found_groups.values()) == {everyone}
        assert everyone.min_arrivals >= 1
        assert (
            quorum * len(members) - 1
            < everyone.min_arrivals
            <= max(1, quorum * len(members) + 1e-6)
        )
    else:
        assert all(found.min_arrivals == 1 for found in found_groups.values())
