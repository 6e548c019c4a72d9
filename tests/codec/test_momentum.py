"""Momentum before selection: the kernel does what torch does, and SGD what both do."""

from __future__ import annotations

import pytest
import torch

from offbeat.codec.momentum import Momentum, MomentumRange, mix_by_kernel, mix_by_torch

NUM_ELEMENTS = 100


def numbers(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ELEMENTS, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mix", [mix_by_kernel, mix_by_torch])
def test_steps_are_those_of_sgd(
    mix: object, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.codec.momentum.mix_by_kernel", mix)
    momentum = Momentum([MomentumRange(end=NUM_ELEMENTS, factor=0.9, nesterov=nesterov)])
    weights = torch.zeros(NUM_ELEMENTS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=nesterov)
    velocity, new_velocity = (torch.zeros(NUM_ELEMENTS, dtype=torch.float64) for _ in range(2))
    for step in range(5):
        before = weights.detach().clone()
        weights.grad = 0.5 * numbers(step)
        optimizer.step()
        flat = numbers(step)
        momentum.apply(flat, velocity, 0.5, new_velocity)
        velocity, new_velocity = new_velocity, velocity
        torch.testing.assert_close(flat, before - weights.detach())


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_gradients_of_one_step_are_their_sum(nesterov: bool) -> None:
    momentum = Momentum([MomentumRange(end=NUM_ELEMENTS, factor=0.9, nesterov=nesterov)])
    old, middle, in_two, in_one = numbers(9), *(torch.empty_like(numbers(0)) for _ in range(3))
    first, second, both = numbers(0), numbers(1), numbers(0) + numbers(1)
    momentum.apply(first, old, 0.5, middle)
    momentum.apply(second, middle, 0.5, in_two, continues=True)
    momentum.apply(both, old, 0.5, in_one)
    torch.testing.assert_close(in_two, in_one)
    torch.testing.assert_close(first + second, both)
