"""A threshold is kept for a period, and sought where too many or too few entries reach it."""

from __future__ import annotations

import pytest
import torch

from offbeat.codec.kept_threshold import KeptThreshold
from offbeat.codec.selectors import THRESHOLD

N, K = 20_000, 200


def gradient(step: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(N, generator=torch.Generator().manual_seed(step))


class Owed:
    """What was not sent, and what the selector remembers."""

    def __init__(self, period: int) -> None:
        self.selector, self.residual = KeptThreshold(period), torch.zeros(N)
        self.selector_state = self.selector.initial_state()


def step(owed: Owed, flat: torch.Tensor) -> int:
    """How many entries travel."""
    selection = owed.selector.select(
        flat, owed.residual, k=K, weight=1.0, state=owed.selector_state
    )
    assert selection.finite
    owed.residual, owed.selector_state = flat, selection.state
    return len(selection.sparse)


def test_what_travels_is_all_that_reaches_the_threshold() -> None:
    owed = Owed(period=1000)
    for number in range(100):  # until as much is sent as comes
        step(owed, gradient(number))
    threshold, counts = owed.selector_state[THRESHOLD], set()
    for number in range(100, 110):
        reached = int(((owed.residual + gradient(number)).abs() >= threshold).sum())
        assert step(owed, gradient(number)) == reached
        assert owed.selector_state[THRESHOLD] == threshold
        assert float(owed.residual.abs().max()) < threshold
        counts.add(reached)
    assert len(counts) > 1


def test_after_a_period_the_threshold_is_that_of_the_k_largest() -> None:
    owed, sought = Owed(period=3), []
    for number in range(7):
        owed.residual.zero_()
        step(owed, gradient(number))
        if owed.selector_state["age"] == 1:
            sought.append(number)
            least = gradient(number).abs().topk(K).values.min().item()
            assert owed.selector_state[THRESHOLD] == pytest.approx(least)
    assert sought == [0, 3, 6]


@pytest.mark.parametrize("scale", [5.0, 1 / 5])
def test_where_the_count_runs_away_a_period_begins(scale: float) -> None:
    owed = Owed(period=1000)
    step(owed, gradient(0))
    owed.residual.zero_()
    before = owed.selector_state[THRESHOLD]
    assert step(owed, gradient(1, scale)) == K
    assert owed.selector_state[THRESHOLD] == pytest.approx(scale * before, rel=0.1)
    assert owed.selector_state["age"] == 1
