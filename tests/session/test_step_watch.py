"""A loop that does not step the attached optimizer is told so, where that matters; one whose
GradScaler the session does not know is refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import offbeat
from offbeat.errors import OffbeatWarning, UnsupportedError
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on

ACT_AT_STEPS = [
    offbeat.LocalSGD(),
    offbeat.WAGMA(),
    offbeat.AdaptiveSGD(),
    offbeat.SPDKFAC(),
]


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def passes(model: torch.nn.Module, count: int, *, by_hand: bool) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).sum().backward()
        if by_hand:
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.parametrize("strategy", ACT_AT_STEPS, ids=lambda strategy: strategy.name)
def test_a_loop_that_writes_parameters_itself_is_told_after_a_few_passes(
    strategy: Any,
) -> None:
    model, optimizer = make()
    with offbeat.attach(model, optimizer, strategy) as session:
        passes(model, 4, by_hand=True)
        with pytest.warns(OffbeatWarning, match="not stepped in 4 .* parameters have changed"):
            passes(model, 1, by_hand=True)
        passes(model, 20, by_hand=True)
        assert sum("not stepped" in notice for notice in session.notices) == 1


def test_another_optimizer_than_the_attached_one_is_noticed() -> None:
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD()):
        for _ in range(4):
            passes(model, 1, by_hand=False)
            other.step()
        with pytest.warns(OffbeatWarning, match="Attach the optimizer that your loop steps"):
            passes(model, 1, by_hand=False)


def test_a_session_that_ends_without_a_step_says_so() -> None:
    model, optimizer = make()
    session = offbeat.attach(model, optimizer, offbeat.LocalSGD())
    passes(model, 2, by_hand=True)
    with pytest.warns(OffbeatWarning, match="not stepped in 2 .* the session ends"):
        session.close()


def test_a_long_accumulation_is_no_fault() -> None:
    model, optimizer = make()
    with offbeat.attach(model, optimizer, offbeat.LocalSGD()) as session:
        passes(model, 40, by_hand=False)
        optimizer.step()
        passes(model, 10, by_hand=True)
        assert session.notices == []


def test_exchanged_gradients_need_no_step() -> None:
    model, optimizer = make()
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        passes(model, 20, by_hand=True)
        assert session.notices == []


def test_an_exception_in_the_loop_is_not_hidden_by_a_warning() -> None:
    model, optimizer = make()

    def train() -> None:
        with offbeat.attach(model, optimizer, offbeat.LocalSGD()):
            passes(model, 2, by_hand=False)
            raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        train()


@pytest.mark.parametrize("strategy", [offbeat.AllReduce(), offbeat.LocalSGD()])
def test_a_scaler_that_was_not_handed_over_is_refused_in_the_first_step(strategy: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy) as session:
        idle = torch.amp.GradScaler("cpu", enabled=False)
        idle.scale(model(torch.ones(3, 2)).sum()).backward()
        idle.step(optimizer)
    with offbeat.attach(model, optimizer, strategy):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(3, 2)).sum()).backward()
        with pytest.raises(UnsupportedError, match="scaler=scaler"):
            scaler.step(optimizer)
    assert session.stats.steps == 1


@pytest.mark.parametrize("strategy", [offbeat.AllReduce(), offbeat.LocalSGD()])
def test_what_is_not_trained_and_changes_is_said_to_be_each_ranks_own(strategy: Strategy) -> None:
    """As a momentum encoder inside the model."""

    def job(driver: ThreadDriver) -> list[str]:
        online, target = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False)
        optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
        session = session_on(driver, torch.nn.ModuleList([online, target]), optimizer, strategy)
        with session:
            online(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            target.weight.lerp_(online.weight.detach(), 0.1)
        return session.notices

    is_told = strategy.replicas_differ
    expected = pytest.warns(OffbeatWarning, match=r"'1\.weight'") if is_told else nullcontext()
    with expected:
        notices = results_of(2, job)
    assert [any("each rank has its own" in notice for notice in of) for of in notices] == (
        [is_told] * 2
    )
