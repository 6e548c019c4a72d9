"""A small model and its steps, the same wherever they are taken: ranks are threads, which share
torch's own random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch

from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)]
    model = torch.nn.Sequential(*layers).double()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return model


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step of a rank on the batch that it has then."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


Made = TypeVar("Made")


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(
    num_ranks: int,
    strategy: Strategy,
    num_steps: int,
    *,
    model_of: Callable[[int], torch.nn.Module] = lambda rank: make_model(),
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
    held: Callable[[torch.nn.Module, torch.optim.Optimizer], Made],
    stop: int | None = None,
) -> list[Made]:
    """What each rank holds after so many steps, before the final mean.

    Args:
        num_ranks: how many.
        strategy: of all of them.
        num_steps: how many.
        model_of: makes a rank's model.
        optimizer_of: makes its optimizer.
        held: what is looked at.
        stop: a state is saved after so many steps; a step that it does not hold is taken, and the
            run goes on from the state.
    """

    def job(driver: ThreadDriver) -> Made:
        model = model_of(driver.rank)
        optimizer = optimizer_of(model)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(num_steps):
                if step == stop:
                    parts = (model, optimizer, session)
                    saved = [copy.deepcopy(each.state_dict()) for each in parts]
                    step_of(model, optimizer, driver.rank, 99)
                    for each, state in zip(parts, saved, strict=True):
                        each.load_state_dict(state)
                step_of(model, optimizer, driver.rank, step)
            return held(model, optimizer)

    return results_of(num_ranks, job)
