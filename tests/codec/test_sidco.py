"""SIDCo fits a threshold, and takes the k largest where the fit is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from offbeat.codec.sidco import SIDCo, fitted_threshold

N = 200_000


def exponential(scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.empty(N).exponential_(1 / scale, generator=generator)


def normal() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def heavy_tailed() -> torch.Tensor:
    """A t-distribution with three degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, N, generator=generator)
    return normal[0] / (normal[1:].square().sum(0) / 3).sqrt()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_as_many_exponential_magnitudes_as_asked_for_reach_the_threshold(
    num_stages: int, density: float
) -> None:
    magnitudes = exponential()
    threshold = fitted_threshold(magnitudes, density, num_stages=num_stages)
    assert (magnitudes >= threshold).float().mean().item() == pytest.approx(density, rel=0.25)


def after(flat: torch.Tensor, k: int, num_steps: int) -> tuple[int, Mapping[str, float]]:
    """How many entries are picked in the last of some steps with the same gradient."""
    selector = SIDCo()
    state = selector.initial_state()
    for _ in range(num_steps):
        selection = selector.select(
            flat.clone(), torch.zeros_like(flat), k=k, weight=1.0, state=state
        )
        state = selection.state
    return len(selection.sparse), state


@pytest.mark.parametrize("draw", [heavy_tailed, normal])
def test_stages_are_added_until_a_threshold_fits(draw: Callable[[], torch.Tensor]) -> None:
    k = N // 100
    one_stage = fitted_threshold(draw().abs(), 0.01, num_stages=1)
    assert not 0.8 * k <= (draw().abs() >= one_stage).sum() <= 1.2 * k
    num_picked, state = after(draw(), k, 40)
    assert state["stages"] > 1
    assert num_picked != k  # these reached the threshold
    assert 0.8 * k <= num_picked <= 1.2 * k


def test_the_k_largest_are_taken_where_the_threshold_does_not_fit() -> None:
    num_picked, _ = after(normal(), N // 100, 1)
    assert num_picked == N // 100


def test_what_is_not_finite_is_said() -> None:
    flat = torch.ones(100)
    flat[7] = float("nan")
    selector = SIDCo()
    selection = selector.select(
        flat, torch.zeros(100), k=5, weight=1.0, state=selector.initial_state()
    )
    assert not selection.finite


def test_a_bucket_without_elements_takes_any_number_of_steps() -> None:
    num_picked, state = after(torch.empty(0), 0, 11)
    assert num_picked == 0
    assert state["stages"] == 1
