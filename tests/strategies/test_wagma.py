from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import ConfigError


@pytest.mark.parametrize("interval", [0, 3, 20])
def test_an_interval_that_does_not_divide_the_period_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=f"interval .*got {interval}"):
        offbeat.WAGMA(period=10, interval=interval)


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
    strategy = offbeat.WAGMA(period=10, interval=interval)
    everyone = [
        (version + 1) * interval
        for version in range(40 // interval)
        if strategy.group_of(version, 3, 8).ranks == tuple(range(8))
    ]
    assert everyone == [10, 20, 30, 40]


def test_a_synchronization_waits_for_the_one_before_whatever_the_interval() -> None:
    strategy = offbeat.WAGMA(interval=2)
    assert strategy.group_of(14, 0, 8).catch_up == 9


def test_an_interval_of_the_whole_period_leaves_no_groups() -> None:
    strategy = offbeat.WAGMA(period=6, interval=6)
    everyone = tuple(range(8))
    assert [strategy.group_of(version, 1, 8).ranks for version in range(9)] == [everyone] * 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"values": "e3m0", "merge": "paper"}, "would round the model in each step"),
        ({"values": "e3m0", "period": 5, "interval": 5}, "with interval=period there are none"),
        ({"values": "e3m1"}, "did you mean 'e3m0'"),
    ],
)
def test_codes_of_differences_are_refused_where_there_are_none(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        offbeat.WAGMA(**options)


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
