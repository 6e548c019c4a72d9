"""Deadlines follow the waits that were seen and do not follow outliers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.averaging.background.deadlines import DeadlineRule, deadline_s

waits = st.lists(st.floats(0, 1e4), max_size=300)


@given(waits)
def test_a_deadline_lies_between_floor_and_cap(waits_s: list[float]) -> None:
    rule = DeadlineRule(floor_s=0.5, cap_s=20.0)
    assert 0.5 <= deadline_s(waits_s, rule) <= 20.0


@given(waits, st.floats(0.01, 100.0))
def test_a_deadline_scales_with_the_waits(waits_s: list[float], factor: float) -> None:
    rule = DeadlineRule(floor_s=1e-300, cap_s=1e300, min_samples=1)
    if waits_s and np.median(waits_s) > 1e-6:
        scaled = deadline_s([wait_s * factor for wait_s in waits_s], rule)
        assert scaled == pytest.approx(factor * deadline_s(waits_s, rule), rel=1e-6)


def test_median_and_deviation_by_hand() -> None:
    rule = DeadlineRule(num_mads=2.0, floor_s=0.1, cap_s=100.0, min_samples=5)
    assert deadline_s([1.0, 2.0, 3.0, 4.0, 10.0], rule) == 3.0 + 2.0 * 1.0


def test_before_enough_waits_are_known_the_deadline_is_the_first_one() -> None:
    rule = DeadlineRule(min_samples=3, cap_s=7.0)
    assert deadline_s([0.1, 0.1], rule) == 7.0
    assert deadline_s([0.1, 0.1, 0.1], rule) < 7.0


@pytest.mark.parametrize(("initial_s", "deadline"), [(0.01, 0.25), (2.0, 2.0), (9.0, 7.0)])
def test_the_first_deadline_is_as_told_within_floor_and_cap(
    initial_s: float, deadline: float
) -> None:
    rule = DeadlineRule(min_samples=3, initial_s=initial_s, cap_s=7.0)
    assert deadline_s([], rule) == deadline_s([3.0, 3.0], rule) == deadline
    assert deadline_s([3.0, 3.0, 3.0], rule) == pytest.approx(3.0 + 8 * 0.05 * 3.0)


@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=60), st.integers(1, 9))
def test_a_suspended_rank_does_not_lengthen_the_deadline(
    usual_s: list[float], num_outliers: int
) -> None:
    rule = DeadlineRule(num_mads=4.0, cap_s=1e6)
    with_outliers_s = deadline_s(usual_s + [1e5] * num_outliers, rule)
    assert with_outliers_s <= 1.1 + 4.0 * max(0.2, 0.05 * 1.1)


def test_the_first_slow_steps_are_forgotten() -> None:
    rule = DeadlineRule(window=10, floor_s=0.01)
    assert deadline_s([30.0] * 50 + [0.1] * 10, rule) == deadline_s([0.1] * 10, rule)


def test_a_network_that_became_slower_is_believed() -> None:
    rule = DeadlineRule(window=10, floor_s=0.01)
    assert deadline_s([0.1] * 50 + [2.0] * 10, rule) > 2.0


def test_equal_waits_leave_room_for_the_next() -> None:
    assert deadline_s([1.0] * 20, DeadlineRule(num_mads=8.0, min_spread=0.05)) == pytest.approx(1.4)
