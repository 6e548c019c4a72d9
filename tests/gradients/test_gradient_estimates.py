"""EF21 against a plain, dense loop, and what its estimates keep to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import offbeat
from conformance_support.lent import lent
from offbeat.errors import CheckpointError
from offbeat.run.coupling import share_of
from thread_support.world import ThreadDriver, results_of, session_on

Vector = NDArray[np.float64]

STEPS, LR = 12, 0.3
BARE = lent(offbeat.EF21(density=0.25), replica_check_interval=1)
ROUGH = replace(BARE, codec="reuse+float8")
ALL = replace(BARE, density=1.0)


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    model = torch.nn.Linear(6, 4, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(shape, generator=draw).to(dtype) for shape in ((5, 6), (5, 4)))
    return (model(x).tanh() - y).square().mean()


def vector_of(model: torch.nn.Module) -> Vector:
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


def gradient_of(point: Vector, rank: int, step: int) -> Vector:
    model = make_model()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(point), model.parameters())
    loss_of(model, rank, step).backward()
    return np.concatenate(
        [p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]
    )


def largest(vector: Vector, k: int) -> Vector:
    kept = np.zeros_like(vector)
    kept[np.argsort(-abs(vector))[:k]] = vector[np.argsort(-abs(vector))[:k]]
    return kept


def published(num_ranks: int, *, lr: float, eta: float) -> Vector:
    """EF21-SGDM as algorithm 1 has it, with dense vectors, from v = g = 0; EF21 where eta is 1."""
    x = vector_of(make_model())
    v, g_own = np.zeros((2, num_ranks, x.size))
    k = round(BARE.density * x.size)
    for step in range(STEPS):
        for rank in range(num_ranks):
            v[rank] = (1 - eta) * v[rank] + eta * gradient_of(x, rank, step)
            g_own[rank] += largest(v[rank] - g_own[rank], k)
        x = x - lr * g_own.mean(axis=0)
    return x


@pytest.mark.parametrize("num_ranks", [1, 3, 5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_rank_trains_as_the_paper_says(num_ranks: int, momentum: float) -> None:
    def job(driver: ThreadDriver) -> Vector:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        with session_on(driver, model, optimizer, BARE):
            for step in range(STEPS):
                loss_of(model, driver.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return vector_of(model)

    eta = 1 - momentum
    wanted = published(num_ranks, lr=LR / eta, eta=eta)
    for trained in results_of(num_ranks, job):
        np.testing.assert_allclose(trained, wanted, rtol=1e-6, atol=1e-9)


def local_of(state: dict[str, Any], kind: str) -> torch.Tensor:
    local = state["callbacks"]["gradients"]["local"]
    return torch.cat([local[f"{kind}/{name}"].flatten() for name in ("weight", "bias")])


@pytest.mark.parametrize("strategy", [BARE, ROUGH], ids=["bare", "rough"])
def test_all_ranks_hold_the_sum_of_all_ranks_estimates(strategy: offbeat.EF21) -> None:
    """In float32, with values that messages round."""

    def job(driver: ThreadDriver) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        model, seen = make_model(torch.float32), []
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(STEPS):
                loss_of(model, driver.rank, step).backward()
                gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
                state = session.state_dict()
                seen.append((local_of(state, "own"), local_of(state, "sum"), gradient.clone()))
                optimizer.step()
                optimizer.zero_grad()
        return seen

    for ranks in zip(*results_of(3, job), strict=True):
        of_all = sum(own for own, _, _ in ranks)
        for _, total, gradient in ranks:
            torch.testing.assert_close(total, of_all, rtol=1e-5, atol=1e-6)
            assert torch.equal(total, gradient)
            assert torch.equal(total, ranks[0][1])


def test_gradients_that_stay_are_found_with_the_weights_of_their_samples() -> None:
    """After as many exchanges as it takes to send every entry, and however little is sent."""
    weights = (1, 2, 5)

    def job(driver: ThreadDriver) -> Vector:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(driver, model, optimizer, BARE) as session:
            for _ in range(12):
                optimizer.zero_grad()
                session.weigh(weights[driver.rank])
                loss_of(model, driver.rank, 0).backward()
                optimizer.step()
        return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])

    gradients = [gradient_of(vector_of(make_model()), rank, 0) for rank in range(3)]
    wanted = np.average(gradients, axis=0, weights=weights)
    for found in results_of(3, job):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def mean_velocity(states: list[dict[str, Any]]) -> torch.Tensor:
    transforms = [state["callbacks"]["gradient_transform"]["additive"] for state in states]
    of_ranks = [torch.cat([each.flatten() for each in one.values()]) for one in transforms]
    return torch.stack(of_ranks).mean(0)


def trained(
    steps: range, strategy: offbeat.EF21, states: list[dict[str, Any]] | None = None
) -> Callable[[ThreadDriver], tuple[dict[str, Any], Vector]]:
    """What each rank does: go on from `states`, of however many ranks, and return its own."""

    def job(driver: ThreadDriver) -> tuple[dict[str, Any], Vector]:
        model = make_model(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        with session_on(driver, model, optimizer, strategy) as session:
            if states is not None:
                session.load_state_dict(offbeat.reshard(states, driver.world_size, driver.rank))
            gradient = np.zeros(0)
            for step in steps:
                loss_of(model, driver.rank, step).backward()
                gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
            return copy.deepcopy(session.state_dict()), gradient

    return job


@pytest.mark.parametrize("strategy", [BARE, ROUGH], ids=["bare", "rough"])
def test_with_as_many_ranks_a_resumed_run_goes_on_to_the_bit(strategy: offbeat.EF21) -> None:
    straight = results_of(3, trained(range(8), strategy))
    states = [state for state, _ in results_of(3, trained(range(5), strategy))]
    resumed = results_of(3, trained(range(5, 8), strategy, states))
    for (_, mine), (_, wanted) in zip(resumed, straight, strict=True):
        assert np.array_equal(mine, wanted)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_with_another_number_of_ranks_all_begin_at_the_mean(num_ranks: int) -> None:
    """Departed ranks leave the estimates, and the means stay what they were."""
    states = [state for state, _ in results_of(3, trained(range(5), ROUGH))]
    mean = local_of(states[0], "sum")
    after = [state for state, _ in results_of(num_ranks, trained(range(0), ROUGH, states))]
    for state in after:
        assert torch.equal(local_of(state, "sum"), mean)
        torch.testing.assert_close(local_of(state, "own"), mean / num_ranks)
    torch.testing.assert_close(mean_velocity(after), mean_velocity(states))


def test_where_one_rank_alone_was_saved_the_mean_is_still_that_of_all_gradients() -> None:
    """Other ranks have their own estimates no more, and what they then send must lead there."""
    saved = results_of(3, trained(range(5), ROUGH))[1][0]
    states = [share_of(saved, rank, 3) for rank in range(3)]
    after = [state for state, _ in results_of(3, trained(range(0), ROUGH, states))]
    of_all = sum(local_of(state, "own") for state in after)
    torch.testing.assert_close(of_all, local_of(saved, "sum"))
    assert torch.equal(local_of(after[1], "own"), local_of(saved, "own"))


def test_momentum_that_nothing_would_apply_is_refused() -> None:
    states = [state for state, _ in results_of(1, trained(range(2), ROUGH))]
    without = replace(ROUGH, momentum_correction=None)
    with pytest.raises(CheckpointError, match="taken over momentum"):
        results_of(1, trained(range(1), without, states))


def test_where_all_of_the_gradient_travels_it_is_sent_as_it_is() -> None:
    wanted = np.mean([gradient_of(vector_of(make_model()), rank, 0) for rank in range(3)], axis=0)
    for _, found in results_of(3, trained(range(1), ALL)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
