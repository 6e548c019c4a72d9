from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import ConfigError


@pytest.mark.parametrize("interval", [0, 3, 20])
def test_an_interval_that_does_not_divide_the_period_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=f"interval must be .*got {interval}"):
        offbeat.WAGMA(period=10, interval=interval)


def test_an_interval_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match='with groups="off" there are none'):
        offbeat.WAGMA(period=10, interval=5, groups="off")


def test_values_of_bfloat16_are_refused_where_an_average_takes_the_place_of_the_model() -> None:
    with pytest.raises(ConfigError, match='merge="paper" takes an average in the place'):
        offbeat.WAGMA(merge="paper", overlap=False, values="bfloat16")


def test_a_group_above_the_workers_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="group_size is 8, allowed is 2 to 4, the number of work"):
        offbeat.WAGMA(group_size=8).check_world(4)


@pytest.mark.parametrize("interval", [1, 2, 5, 10])
def test_all_ranks_average_after_every_period_of_steps_whatever_the_interval(
    interval: int,
) -> None:
    strategy = offbeat.WAGMA(period=10, interval=interval, group_size=2)
    everyone = [
        (version + 1) * interval
        for version in range(40 // interval)
        if strategy.group_of(version, 3, 8).ranks == tuple(range(8))
    ]
    assert everyone == [10, 20, 30, 40]


@pytest.mark.parametrize(("period", "intervals"), [(10, (1, 2, 5)), (6, (1, 2, 3))])
def test_an_interval_that_workers_choose_is_below_the_period(
    period: int, intervals: tuple[int, ...]
) -> None:
    strategy = offbeat.WAGMA(period=period, interval="auto")
    assert strategy.intervals == intervals
    everyone = [
        version
        for version in range(3 * strategy.numbers.in_a_period)
        if strategy.group_of(version, 3, 8).ranks == tuple(range(8))
    ]
    assert len(everyone) == 3


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("groups", ["rotating", "fixed"])
def test_at_an_interval_that_workers_chose_groups_are_those_of_the_same_fixed_interval(
    interval: int, groups: Literal["rotating", "fixed"]
) -> None:
    fixed = offbeat.WAGMA(interval=interval, groups=groups)
    chosen = offbeat.WAGMA(interval="auto", groups=groups)
    version = -1
    for expected in range(20 // interval):
        version = chosen.numbers.next_after(version, interval)
        group, other = chosen.group_of(version, 2, 8), fixed.group_of(expected, 2, 8)
        assert (group.ranks, group.min_arrivals) == (other.ranks, other.min_arrivals)


def test_a_synchronization_waits_for_the_one_before_whatever_the_interval() -> None:
    strategy = offbeat.WAGMA(interval="auto", max_ahead=25)
    in_a_period = strategy.numbers.in_a_period
    assert strategy.group_of(3 * in_a_period - 1, 0, 8).catch_up == 2 * in_a_period - 1


@pytest.mark.parametrize("budget", [0.0, -0.1])
def test_a_budget_of_nothing_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="budget must be greater than 0"):
        offbeat.WAGMA(interval="auto", budget=budget)


def test_an_interval_of_the_whole_period_is_the_strategy_without_groups() -> None:
    whole = offbeat.WAGMA(period=6, interval=6, max_ahead=20)
    without = offbeat.WAGMA(period=6, groups="off", max_ahead=20)
    assert [whole.group_of(version, 1, 8) for version in range(9)] == [
        without.group_of(version, 1, 8) for version in range(9)
    ]


@pytest.mark.parametrize(
    ("options", "num_elements", "dtype", "rounds"),
    [
        ({}, 1_000_000, np.float32, True),
        ({}, 1_000_000, np.float64, False),
        ({}, 1_000, np.float32, False),
        ({"overlap": False}, 1_000_000, np.float32, False),
        ({"merge": "paper"}, 1_000_000, np.float32, False),
        ({"values": "float32"}, 1_000_000, np.float32, False),
        ({"values": "bfloat16"}, 10, np.float64, True),
    ],
)
def test_values_are_rounded_where_that_saves_something_and_ranks_differ_anyway(
    options: dict[str, Any], num_elements: int, dtype: type[np.floating], rounds: bool
) -> None:
    assert offbeat.WAGMA(**options).rounds(num_elements, np.dtype(dtype)) == rounds


@pytest.mark.parametrize(
    ("options", "kind", "scales"),
    [
        ({"rate_scaling": "auto"}, torch.optim.AdamW, True),
        ({"rate_scaling": "auto"}, torch.optim.SGD, False),
        ({}, torch.optim.Adam, False),
        ({"rate_scaling": "sqrt"}, torch.optim.SGD, True),
    ],
)
def test_learning_rates_are_scaled_where_steps_are_divided_by_squares(
    options: dict[str, Any], kind: type[torch.optim.Optimizer], scales: bool
) -> None:
    optimizer = kind([torch.zeros(1)], lr=0.1)  # type: ignore[call-arg]
    assert offbeat.WAGMA(**options).scales_rates(optimizer) == scales


def test_an_unknown_rate_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rate_scaling must be .*got 'root'"):
        offbeat.WAGMA(rate_scaling="root")  # type: ignore[arg-type]
