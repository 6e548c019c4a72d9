"""Medians and their intervals: an interval holds its median, scale does not matter, and what
overlaps is not decided.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat_lab.statistics import Estimate, block_slices, compare, estimate

positive = st.floats(1e-3, 1e3)
samples = st.lists(positive, min_size=2, max_size=12)
few = hypothesis_settings(max_examples=20)  # each draws thousands of resamples


@few
@given(samples)
def test_the_interval_holds_the_median_and_is_the_same_every_time(values: list[float]) -> None:
    found = estimate(values)
    assert found.median == pytest.approx(float(np.median(values)))
    assert found.median is not None
    assert found.low is not None
    assert found.high is not None
    in_order = [found.low, found.median, found.high]
    assert in_order == pytest.approx(sorted(in_order), rel=1e-12)  # percentiles are interpolated
    assert estimate(values) == found  # nothing is left to chance


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert estimate([2.5] * 3) == Estimate(values=[2.5] * 3, median=2.5, low=2.5, high=2.5)
    same = compare(estimate([2.0] * 3), estimate([2.0] * 3))
    assert (same.ratio, same.low, same.high, same.decided) == (1.0, 1.0, 1.0, False)


def test_equal_samples_that_differ_from_others_are_decided() -> None:
    found = compare(estimate([3.0] * 3), estimate([2.0] * 3))
    assert (found.ratio, found.low, found.high, found.decided) == (1.5, 1.5, 1.5, True)


def test_three_seeds_promise_less_than_their_range() -> None:
    """Two other sets of three from the same place would often lie apart if they promised no more
    than their range.
    """
    found = estimate([3.0, 1.0, 2.0])
    assert found.median == 2.0
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 1.0
    assert found.high > 3.0


def test_differences_of_one_sign_may_be_none_all_the_same() -> None:
    found = estimate([0.1, 1.5, 0.2], signed=True)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0 < found.high
    mirrored = estimate([-0.1, -1.5, -0.2], signed=True)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_runs_that_have_no_value_are_left_out() -> None:
    found = estimate([1.0, None, 3.0])
    assert found == Estimate(values=[1.0, None, 3.0], median=2.0, low=1.0, high=3.0)
    assert estimate([None, None]) == Estimate(values=[None, None], median=None, low=None, high=None)
    assert estimate([]) == Estimate(values=[], median=None, low=None, high=None)
    ratio = compare(found, estimate([None, 20.0, 40.0]))
    assert ratio.ratio == pytest.approx(2 / 30)
    assert ratio.decided


def test_one_sample_says_nothing_about_the_spread() -> None:
    one, other = estimate([1.0]), estimate([100.0])
    assert (one.median, one.low, one.high) == (1.0, None, None)
    ratio = compare(other, one)
    assert (ratio.ratio, ratio.low, ratio.high, ratio.decided) == (100.0, None, None, False)


def test_finer_samples_give_the_interval_and_the_values_stay() -> None:
    found = estimate([5.0], [1.0, 2.0, 3.0])
    assert (found.values, found.median) == ([5.0], 2.0)
    other = estimate([50.0], [10.0, 20.0, 30.0])
    ratio = compare(other, found, [10.0, 20.0, 30.0], [1.0, 2.0, 3.0])
    assert ratio.ratio == pytest.approx(10.0)
    assert ratio.decided


@few
@given(samples, samples, st.sampled_from([2.0**-10, 2.0**10]))
def test_a_ratio_does_not_depend_on_the_unit(a: list[float], b: list[float], factor: float) -> None:
    """Powers of two, so that not one bit of a quotient changes."""
    in_other_unit = compare(estimate([x * factor for x in a]), estimate([x * factor for x in b]))
    assert in_other_unit == compare(estimate(a), estimate(b))


@few
@given(samples, samples)
def test_turned_round_a_ratio_is_its_inverse_and_as_decided(a: list[float], b: list[float]) -> None:
    there, back = compare(estimate(a), estimate(b)), compare(estimate(b), estimate(a))
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.ratio * (1 + 1e-12)
    assert there.ratio <= there.high * (1 + 1e-12)
    if there.decided:
        assert not there.low <= 1 <= there.high


@few
@given(samples, st.integers(0, 1_000))
def test_a_difference_within_the_spread_is_never_decided(values: list[float], seed: int) -> None:
    """Two runs of one thing: the second has the same samples in another order, scaled by less than
    their interval is wide.
    """
    found = estimate(values)
    assert found.low is not None
    assert found.high is not None
    scale = (found.high / found.low) ** 0.99
    others = [float(value) * scale for value in np.random.default_rng(seed).permutation(values)]
    assert not compare(estimate(values), estimate(others)).decided
    assert not compare(estimate(others), estimate(values)).decided


@few
@given(
    st.lists(st.floats(1.0, 2.0), min_size=3, max_size=12),
    st.lists(st.floats(10.0, 20.0), min_size=3, max_size=12),
)
def test_a_tenfold_difference_is_decided(small: list[float], large: list[float]) -> None:
    ratio = compare(estimate(large), estimate(small))
    assert ratio.decided
    assert ratio.ratio >= 5


def test_zeros_among_the_samples_leave_the_interval_open() -> None:
    found, zeros = estimate([1.0, 1.0, 1.0]), estimate([0.0, 5.0, 5.0])
    for ratio in (compare(found, zeros), compare(zeros, found)):
        assert (ratio.low, ratio.high, ratio.decided) == (None, None, False)


def blocks(durations_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their means."""
    return np.array([durations_s[each].mean() for each in block_slices(durations_s.size)])


@given(st.integers(1, 400))
def test_blocks_leave_the_first_steps_out_and_use_all_others(num_steps: int) -> None:
    durations_s = np.arange(1.0, num_steps + 1)
    left_out = min(10, num_steps // 4)
    found = blocks(durations_s)
    assert len(found) == min(12, num_steps - left_out)
    assert found.min() > left_out
    sizes = [block.size for block in np.array_split(durations_s[left_out:], len(found))]
    assert np.average(found, weights=sizes) == pytest.approx(durations_s[left_out:].mean())


def test_no_steps_have_no_blocks() -> None:
    assert blocks(np.array([])).size == 0


@pytest.mark.parametrize("num_steps", [74, 106, 490, 4_010])
def test_a_strategy_that_exchanges_every_fourth_step_counts_with_its_mean(num_steps: int) -> None:
    """The median step would hide the slow ones."""
    durations_s = np.tile([1.0, 1.0, 1.0, 5.0], num_steps // 4 + 1)[:num_steps]
    assert np.median(durations_s) == 1.0
    assert np.median(blocks(durations_s)) == pytest.approx(2.0, rel=0.13)


def test_a_hiccup_of_the_machine_does_not_count() -> None:
    durations_s = np.full(100, 0.1)
    durations_s[50] = 60.0
    assert float(np.median(blocks(durations_s))) == pytest.approx(0.1)


def test_no_interval_passes_what_no_value_can() -> None:
    free, bounded = estimate([0.99, 0.9, 0.98]), estimate([0.99, 0.9, 0.98], most=1.0)
    assert free.high is not None
    assert free.high > 1.0
    assert bounded == free.model_copy(update={"high": 1.0})


def test_two_runs_of_one_thing_are_seldom_called_different() -> None:
    """Of four numbers the first two are the smallest, or the largest, in a third of all orders."""
    draws = np.random.default_rng(0).lognormal(0.0, 0.1, (100, 2, 2)).tolist()
    decided = [compare(estimate(one), estimate(other)).decided for one, other in draws]
    assert sum(decided) < 15
    assert compare(estimate([20.0, 20.5]), estimate([2.0, 2.1])).decided
