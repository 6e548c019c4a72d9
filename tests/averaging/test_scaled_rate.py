from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offbeat.averaging.scaled_rate import SquareRootRate


def one_weight(kind: type[torch.optim.Optimizer]) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    weight = torch.zeros(200, requires_grad=True)
    return weight, kind([weight], lr=0.01)  # type: ignore[call-arg]


def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer, gradient: np.ndarray) -> None:
    weight.grad = torch.from_numpy(gradient.astype(np.float32))
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_where_gradients_are_noise_the_mean_of_ranks_goes_as_far_as_with_mean_gradients(
    kind: type[torch.optim.Optimizer],
) -> None:
    num_ranks, num_steps = 9, 30
    noise = np.random.default_rng(0).normal(size=(num_steps, num_ranks, 200)) + 0.05
    together, optimizer = one_weight(kind)
    for each in noise:
        step(together, optimizer, each.mean(axis=0))
    ends = []
    for rank in range(num_ranks):
        weight, optimizer = one_weight(kind)
        part = SquareRootRate(optimizer, lambda: num_ranks)
        for each in noise:
            part.on_before_step()
            step(weight, optimizer, each[rank])
            part.on_after_step()
        ends.append(weight.detach())
    apart = torch.stack(ends).mean(dim=0)
    assert float(apart.norm() / together.detach().norm()) == pytest.approx(1, abs=0.1)


def test_schedulers_see_the_rate_that_they_have_set() -> None:
    _, optimizer = one_weight(torch.optim.Adam)
    num_ranks = [4]
    part = SquareRootRate(optimizer, lambda: num_ranks[0])
    (group,) = optimizer.param_groups
    part.on_before_step()
    assert group["lr"] == 0.02
    part.on_after_step()
    assert group["lr"] == 0.01
    group["lr"], num_ranks[0] = 0.005, 3  # a scheduler, and a death
    part.on_before_step()
    assert group["lr"] == 0.005 * math.sqrt(3)
    part.on_after_step()
    assert group["lr"] == 0.005


def test_a_step_that_raised_does_not_multiply_twice() -> None:
    _, optimizer = one_weight(torch.optim.Adam)
    part = SquareRootRate(optimizer, lambda: 4)
    (group,) = optimizer.param_groups
    part.on_before_step()
    part.on_closure()
    assert group["lr"] == 0.02
    part.close()
    assert group["lr"] == 0.01
