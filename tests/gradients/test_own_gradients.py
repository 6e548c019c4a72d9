"""Steps without a backward pass: gradients that a loop computes itself, as evolution strategies and
Reptile do, and ranks that have run out of batches.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Literal

import pytest
import torch

import offbeat
from offbeat.strategies.base import Strategy
from thread_support.nets import make_model
from thread_support.world import ThreadDriver, results_of, session_on


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def gradients_of(model: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss_of(model, rank, step), [*model.parameters()])]


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize(
    "strategy",
    [offbeat.AllReduce(), offbeat.PowerSGD(rank=1000)],
    ids=lambda each: each.name,
)
def test_what_is_written_where_the_last_gradients_were_is_exchanged(
    strategy: Strategy, zeroes: bool
) -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy):
            for step in range(4):
                found = gradients_of(model, driver.rank, step)
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.copy_(gradient)
                optimizer.step()
                if zeroes:
                    optimizer.zero_grad(set_to_none=False)
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = make_model()
    for step in range(4):
        pairs = zip(gradients_of(alone, 0, step), gradients_of(alone, 1, step), strict=True)
        for parameter, (one, other) in zip(alone.parameters(), pairs, strict=True):
            parameter.data.sub_((one + other) / 2, alpha=0.05)
    for found in results_of(2, job):
        torch.testing.assert_close(found, [*alone.parameters()], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [offbeat.AllReduce(), offbeat.DeAR(), offbeat.GTopK(density=0.5, collective="tree")],
    ids=lambda each: each.name,
)
def test_a_rank_without_a_batch_brings_nothing_though_its_last_gradient_is_still_there(
    strategy: Strategy,
) -> None:
    def job(driver: ThreadDriver, *, always_zeroes: bool) -> list[torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy):
            for step in range(7):
                has_batch = step < (6, 3)[driver.rank]  # nobody has one in the last step
                if has_batch or always_zeroes:
                    optimizer.zero_grad()
                if has_batch:
                    loss_of(model, driver.rank, step).backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = results_of(2, partial(job, always_zeroes=False))
    wanted, _ = results_of(2, partial(job, always_zeroes=True))
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", [offbeat.AllReduce(), offbeat.DeAR()], ids=lambda each: each.name
)
def test_a_rank_without_a_batch_clips_the_mean_of_the_others(strategy: Strategy) -> None:
    def job(driver: ThreadDriver, *, joins: bool) -> list[torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(3):
                if step == driver.rank:
                    loss_of(model, driver.rank, step).backward()
                elif joins:
                    session.join()
                assert session.clip_grad_norm_(0.01) > 0.01 or step == 2
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wanted, _ = results_of(2, partial(job, joins=True))
    for found in results_of(2, partial(job, joins=False)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "strategy", [offbeat.AllReduce(), offbeat.DeAR()], ids=lambda each: each.name
)
def test_the_norm_that_is_asked_for_after_a_step_is_that_of_its_gradient(
    strategy: Strategy,
) -> None:
    def job(driver: ThreadDriver) -> tuple[list[bool], int]:
        model, same = make_model(), list[bool]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(3):
                loss_of(model, driver.rank, step).backward()
                norm = session.clip_grad_norm_(math.inf)
                optimizer.step()
                same.append(bool(norm) and bool(session.clip_grad_norm_(math.inf) == norm))
                optimizer.zero_grad()
            return same, session.stats.exchanges

    assert results_of(2, job) == [([True] * 3, 3)] * 2


def test_a_rank_without_a_batch_takes_part_in_full_precision_where_it_clips_in_autocast() -> None:
    def job(driver: ThreadDriver, *, autocasts: bool) -> torch.Tensor:
        model = torch.nn.Linear(64, 64, bias=False)
        model.weight.data.fill_(1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with session_on(driver, model, optimizer, offbeat.PowerSGD(rank=1)) as session:
            for step in range(3):
                if step % 2 == driver.rank:
                    draw = torch.Generator().manual_seed(step)
                    model(torch.randn(3, 64, generator=draw)).square().sum().backward()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
                    session.clip_grad_norm_(0.5)
                    optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().clone()

    wanted = results_of(2, partial(job, autocasts=False))
    torch.testing.assert_close(results_of(2, partial(job, autocasts=True)), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "strategy", [offbeat.DeAR(), offbeat.GTopK(collective="tree")], ids=lambda each: each.name
)
def test_a_loop_that_clips_after_each_accumulated_pass_exchanges_once_in_a_step(
    strategy: Strategy,
) -> None:
    def job(driver: ThreadDriver) -> int:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(3):
                for context in (session.no_sync(), session.no_sync(), nullcontext()):
                    with context:
                        loss_of(model, driver.rank, step).backward()
                    session.clip_as_loop_does(0.01)
                optimizer.step()
                optimizer.zero_grad()
            return session.stats.exchanges

    assert results_of(2, job) == [3, 3]


@pytest.mark.parametrize("collective", ["tree", "all_gather"])
def test_what_is_owed_moves_a_parameter_on_all_ranks_though_some_have_frozen_it_by_then(
    collective: Literal["tree", "all_gather"],
) -> None:
    """A rank without a batch takes part when it steps, and others in their backward pass."""

    def job(driver: ThreadDriver) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = offbeat.GTopK(density=0.25, collective=collective)
        with session_on(driver, model, optimizer, strategy):
            for used, size in zip(model, (1.0, 0.1), strict=True):
                if driver.rank == 0:
                    (used * torch.tensor([3.0, 2.0])).sum().mul(size).backward()
                model[0].requires_grad_(used is model[0])
                optimizer.step()
                optimizer.zero_grad()
        return model[0].detach()

    for found in results_of(2, job):
        assert found.tolist() == [-1.5, -1.0]
