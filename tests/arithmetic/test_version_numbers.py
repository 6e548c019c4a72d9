"""How versions are numbered where ranks may average at different intervals."""

from __future__ import annotations

import itertools

import pytest

from offbeat.arithmetic.version_numbers import VersionNumbers
from offbeat.errors import ConfigError

CASES = [(1, (1,)), (10, (1,)), (10, (5,)), (10, (10,)), (10, (1, 2, 5)), (12, (1, 2, 3, 4, 6))]


def versions(numbers: VersionNumbers, interval: int, count: int) -> list[int]:
    """The first versions of a rank that keeps `interval`."""
    found = itertools.accumulate(
        range(count), lambda version, _: numbers.next_after(version, interval), initial=-1
    )
    return list(found)[1:]


@pytest.mark.parametrize(("period", "intervals"), CASES)
def test_a_rank_that_keeps_its_interval_meets_all_ranks_once_in_a_period(
    period: int, intervals: tuple[int, ...]
) -> None:
    numbers = VersionNumbers(period, intervals)
    for interval in intervals:
        found = versions(numbers, interval, 3 * (period // interval))
        assert found == sorted(set(found))
        is_global = [numbers.is_global(version) for version in found]
        assert is_global == ([False] * (period // interval - 1) + [True]) * 3


@pytest.mark.parametrize(("period", "intervals"), CASES)
def test_its_groups_rotate_as_if_there_was_no_other_interval(
    period: int, intervals: tuple[int, ...]
) -> None:
    numbers = VersionNumbers(period, intervals)
    for interval in intervals:
        for count, version in enumerate(versions(numbers, interval, 3 * (period // interval))):
            assert numbers.is_global(version) or numbers.rotation(version) == count


@pytest.mark.parametrize(("period", "intervals"), CASES)
def test_ranks_of_all_intervals_have_the_same_global_synchronizations(
    period: int, intervals: tuple[int, ...]
) -> None:
    numbers = VersionNumbers(period, intervals)
    met = [
        [version for version in versions(numbers, each, 3 * period) if numbers.is_global(version)]
        for each in intervals
    ]
    assert all(found[:3] == met[0][:3] for found in met)
    assert len(met[0]) >= 3


def test_with_one_interval_the_numbers_are_consecutive() -> None:
    assert versions(VersionNumbers(10, (2,)), 2, 12) == list(range(12))


@pytest.mark.parametrize("intervals", [(), (3,), (0, 1), (1, 20)])
def test_what_does_not_divide_the_period_is_refused(intervals: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"allowed are divisors of the period"):
        VersionNumbers(10, intervals)
