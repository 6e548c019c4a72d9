"""Replicas that part are found early, with the reason if it is one that the ranks can see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat import Session
from offbeat.errors import DivergedError
from offbeat.gradients import replica_check
from thread_support.world import ThreadDriver, in_threads, results_of, session_on

Loop = Callable[[int, int, torch.nn.Linear, torch.optim.Optimizer], None]
"""What a rank does to its model and optimizer before a step."""


def train(driver: ThreadDriver, num_steps: int, *, interval: int, before_step: Loop) -> Session:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = lent(offbeat.AllReduce(), replica_check_interval=interval)
    with session_on(driver, model, optimizer, strategy) as session:
        for step in range(1, num_steps + 1):
            model(torch.full((3, 4), 1 / (1.0 + driver.rank + step))).square().mean().backward()
            before_step(driver.rank, step, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return session


def other_rate_on_rank_1(
    rank: int, step: int, model: torch.nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.param_groups[0]["lr"] = 0.2 if rank == 1 else 0.1


def other_weight_on_rank_1(
    rank: int, step: int, model: torch.nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    with torch.no_grad():
        model.weight[0, 0] += 1e-3 * (rank == 1 and step == 2)


def nothing(rank: int, step: int, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """As loops should."""


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (
            other_rate_on_rank_1,
            r"after step 1 .* group 0 has lr=0.2 on rank 1 and lr=0.1 on rank 0",
        ),
        (other_weight_on_rank_1, r"after step 10 .* ranks \[1\] .* have the same options"),
    ],
)
def test_replicas_that_part_are_found_long_before_the_interval(loop: Loop, said: str) -> None:
    def job(driver: ThreadDriver) -> Session:
        return train(driver, 30, interval=100, before_step=loop)

    for outcome in in_threads(2, job):
        assert isinstance(outcome, DivergedError)
        with pytest.raises(DivergedError, match=said):
            raise outcome


@pytest.mark.filterwarnings("ignore::offbeat.errors.OffbeatWarning")
def test_on_unlike_processors_replicas_may_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(device: torch.device) -> str:
        return f"processor {threading.get_ident()}"  # ranks are threads here

    def job(driver: ThreadDriver, loop: Loop) -> list[str]:
        session = train(driver, 30, interval=100, before_step=loop)
        return [notice for notice in session.notices if "processor" in notice]

    monkeypatch.setattr(replica_check, "processor", kind)
    for said in results_of(2, partial(job, loop=other_weight_on_rank_1)):
        assert len(said) == 1
        assert "ranks [1]" in said[0]
        assert said[0].count("processor ") == 2
    # Unlike options are a reason that rounding is not.
    for outcome in in_threads(2, partial(job, loop=other_rate_on_rank_1)):
        assert isinstance(outcome, DivergedError)


def test_replicas_are_compared_after_two_early_steps_and_at_the_interval() -> None:
    def messages(num_steps: int, interval: int) -> int:
        def job(driver: ThreadDriver) -> int:
            loop = train(driver, num_steps, interval=interval, before_step=nothing)
            return loop.stats.messages_sent

        return results_of(2, job)[0]

    def comparisons(num_steps: int, interval: int) -> int:
        return messages(num_steps, interval) - messages(num_steps, 0)

    assert [comparisons(n, 20) for n in (1, 9, 10, 19, 20, 45)] == [1, 1, 2, 2, 3, 4]


def test_a_state_without_comparisons_can_be_resumed_with_them() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(
        model, optimizer, lent(offbeat.AllReduce(), replica_check_interval=0)
    ) as session:
        state = session.state_dict()
    with offbeat.attach(
        model, optimizer, lent(offbeat.AllReduce(), replica_check_interval=7)
    ) as session:
        session.load_state_dict(state)
