"""What options of the sparse strategies do to the mean that ranks apply, with ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError
from thread_support.world import ThreadDriver, results_of, session_on

NUM_RANKS = 3
Means = list[list[torch.Tensor]]
"""By step and parameter."""


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(1)  # the global one is shared by all threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def backward(model: torch.nn.Module, rank: int, step: int) -> None:
    draw = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 20, generator=draw)).square().mean().backward()


def applied(strategy: offbeat.GTopK | offbeat.TopK, num_steps: int) -> Means:
    """The gradients that ranks are given; parameters do not move."""

    def job(driver: ThreadDriver) -> Means:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        means: Means = []
        with session_on(driver, model, optimizer, strategy):
            for step in range(num_steps):
                backward(model, driver.rank, step)
                means.append(
                    [
                        torch.zeros_like(p) if p.grad is None else p.grad.clone()
                        for p in model.parameters()
                    ]
                )
                optimizer.step()
                optimizer.zero_grad()
        return means

    first, *others = results_of(NUM_RANKS, job)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def whole(num_steps: int) -> Means:
    """What `AllReduce` would apply."""
    means: Means = []
    for step in range(num_steps):
        model = net()
        for rank in range(NUM_RANKS):
            backward(model, rank, step)
        means.append([p.grad / NUM_RANKS for p in model.parameters() if p.grad is not None])
    return means


def test_the_first_steps_of_a_warm_up_may_send_everything() -> None:
    strategy = offbeat.GTopK(
        density=0.01, collective="reduce_scatter", warmup=((1.0, 2), (0.25, 1))
    )
    means = applied(strategy, 4)
    torch.testing.assert_close(means[:2], whole(4)[:2])
    sent = [sum(int(mean.count_nonzero()) for mean in step) for step in means[2:]]
    size = sum(p.numel() for p in net().parameters())
    assert sent[0] == pytest.approx(0.25 * size, rel=0.05)
    assert sent[1] == pytest.approx(0.01 * size, abs=2)


@pytest.mark.parametrize(
    "warmup",
    [(), ((0.5, 0),), ((0.0, 3),), ((1.5, 3),), ((0.5, 2.5),), (0.5, 3), "0.5", "0.5x", "paper's"],
)
def test_a_warm_up_that_is_none_is_refused(warmup: object) -> None:
    with pytest.raises(ConfigError, match="pairs of a density .*and a number of"):
        offbeat.GTopK(warmup=warmup)  # type: ignore[arg-type]


def test_five_ranks_agree_on_a_density_and_a_resumed_run_begins_with_it() -> None:
    def job(driver: ThreadDriver) -> list[dict[str, Any]]:
        model, choices = net(), list[dict[str, Any]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state: dict[str, Any] = {}
        for steps in (range(5), range(5, 7)):
            with session_on(driver, model, optimizer, offbeat.GTopK()) as session:
                if state:
                    session.load_state_dict(state)
                for step in steps:
                    backward(model, driver.rank, step)
                    optimizer.step()
                    optimizer.zero_grad()
                state = session.state_dict()
                chosen = state["callbacks"]
                choices.append(
                    {
                        "density": chosen["density"]["replicated"]["density"],
                        "exchanges": chosen["density"]["replicated"]["num_exchanges"],
                        "links": chosen["collective_choice"]["replicated"],
                    }
                )
        return choices

    ranks = results_of(5, job)
    assert all(choices == ranks[0] for choices in ranks)
    first, resumed = ranks[0]
    assert (first.pop("exchanges"), resumed.pop("exchanges")) == (5, 7)
    assert resumed == first


def test_what_is_owed_to_a_group_waits_while_its_learning_rate_is_0() -> None:
    """Sent then, it would move nothing, and be lost."""

    def job(driver: ThreadDriver) -> torch.Tensor:
        model = torch.nn.Linear(8, 1).double()
        torch.nn.init.zeros_(model.weight)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        # Two entries travel in a step.
        with session_on(driver, model, optimizer, offbeat.TopK(density=0.2, warmup=None)):
            for rate, num_steps in ((1.0, 1), (0.0, 10), (1.0, 10)):
                optimizer.param_groups[0]["lr"] = rate
                for step in range(num_steps):
                    is_first = rate and not step and not model.weight.any()
                    model(torch.full((1, 8), float(is_first)).double()).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return model.weight.detach().clone()

    for found in results_of(2, job):
        torch.testing.assert_close(found, torch.full((1, 8), -1.0).double())
