"""A2SGD against its paper's algorithm in one process."""

from __future__ import annotations

import pytest
import torch

import offbeat
from thread_support.world import ThreadDriver, results_of, session_on

SHAPE, LR, PERIOD, NUM_STEPS, NUM_RANKS = (4, 5), 0.1, 3, 8, 3


def gradient_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    gradient = torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    return gradient.abs() if step == 5 and rank == 1 else gradient  # which has no negative part


def test_steps_are_those_of_the_paper_with_averages_of_weights() -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = torch.nn.Linear(*reversed(SHAPE), bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        found = []
        with session_on(driver, model, optimizer, offbeat.A2SGD(period=PERIOD)):
            for step in range(NUM_STEPS):
                (model.weight * gradient_of(driver.rank, step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(model.weight.detach().clone())
        return found

    results = results_of(NUM_RANKS, job)
    weights = [torch.ones(SHAPE, dtype=torch.float64) for _ in range(NUM_RANKS)]
    for step in range(NUM_STEPS):
        gradients = [gradient_of(rank, step) for rank in range(NUM_RANKS)]
        positive = [each[each >= 0].mean() for each in gradients]
        negative = [-each[each < 0].mean() if (each < 0).any() else 0.0 for each in gradients]
        for rank, gradient in enumerate(gradients):
            own = torch.where(gradient >= 0, positive[rank], -negative[rank])
            everyones = torch.where(
                gradient >= 0, sum(positive) / NUM_RANKS, -sum(negative) / NUM_RANKS
            )
            weights[rank] = weights[rank] - LR * (gradient - own + everyones)
        if (step + 1) % PERIOD == 0:
            weights = [torch.stack(weights).mean(0)] * NUM_RANKS
        for found, right in zip(results, weights, strict=True):
            torch.testing.assert_close(found[step], right, rtol=1e-12, atol=1e-12)
    assert not torch.equal(results[0][0], results[1][0])


def test_what_is_positive_and_what_is_negative_moves_as_with_the_mean() -> None:
    """Where all ranks' gradients have the same signs, the mean of all steps is exact."""

    def job(driver: ThreadDriver) -> torch.Tensor:
        model = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with session_on(driver, model, optimizer, offbeat.A2SGD(period=100)):
            gradient = torch.tensor([[1.0 + driver.rank, -3.0 * driver.rank - 1]]).double()
            (model.weight * gradient).sum().backward()
            optimizer.step()
            return model.weight.detach().clone()

    for found in results_of(3, job):
        torch.testing.assert_close(found, torch.tensor([[-2.0, 4.0]]).double())


def test_each_rank_clips_by_the_norm_of_its_own_gradient() -> None:
    def job(driver: ThreadDriver) -> tuple[float, float]:
        model = torch.nn.Linear(*reversed(SHAPE), bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(driver, model, optimizer, offbeat.A2SGD()) as session:
            gradient = gradient_of(driver.rank, 0) * 100**driver.rank
            (model.weight * gradient).sum().backward()
            before = float(model.weight.grad.norm())
            assert float(session.clip_grad_norm_(1.0)) == pytest.approx(before)
            after = float(model.weight.grad.norm())
            optimizer.step()
            return before, after

    (first, clipped), (second, also_clipped) = results_of(2, job)
    assert second > 1.5 * first > 1.5
    assert (clipped, also_clipped) == (pytest.approx(1.0), pytest.approx(1.0))
