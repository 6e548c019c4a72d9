"""Density warm-up schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.warmup import Warmup


def test_the_papers_list_lasts_four_epochs() -> None:
    warmup = Warmup.paper(10)
    assert [warmup.density_at(step, 0.001) for step in (0, 9, 10, 20, 39, 40)] == [
        0.25,
        0.25,
        0.0725,
        0.015,
        0.004,
        0.001,
    ]


@pytest.mark.parametrize("target", [0.001, 0.02])
def test_exponential_warmup_falls_by_the_same_factor_down_to_the_target(target: float) -> None:
    warmup = Warmup.exponential(5, target, epochs=4)
    densities = [1.0, *(warmup.density_at(epoch * 5, target) for epoch in range(5))]
    assert densities[-1] == target
    assert [b / a for a, b in pairwise(densities)] == pytest.approx([target**0.2] * 5)


@given(st.integers(0, 100), st.floats(1e-4, 1), st.integers(1, 9))
def test_never_below_the_target_and_never_rising(
    step: int, target: float, steps_per_epoch: int
) -> None:
    for warmup in (Warmup.paper(steps_per_epoch), Warmup.exponential(steps_per_epoch, target)):
        assert target <= warmup.density_at(step + 1, target) <= warmup.density_at(step, target) <= 1


def test_stages_last_as_long_as_they_say() -> None:
    for warmup in (Warmup.of([(1.0, 2), [0.25, 3]]), Warmup.read("1.0x2+0.25x3")):
        densities = [warmup.density_at(step, 0.01) for step in range(7)]
        assert densities == [1.0, 1.0, 0.25, 0.25, 0.25, 0.01, 0.01]
