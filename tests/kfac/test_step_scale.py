"""What is said of steps that are short."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from kfac_support.reference import batch_of, loss_of, make_net
from offbeat.kfac.curvature import Grafting
from offbeat.kfac.preconditioner import ShortLayers, StepScale
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from thread_support.world import ThreadDriver, results_of, session_on

WEIGHTS = [torch.nn.Parameter(torch.ones(2))]
SAID = ["kl_clip=0.001 shortened 26 of 50 steps, more than half of them to 0.1 of"]


@pytest.mark.parametrize(
    ("num_short", "optimizer", "said"),
    [
        (25, torch.optim.SGD(WEIGHTS), []),
        (26, torch.optim.SGD(WEIGHTS), SAID),
        (26, torch.optim.SGD(WEIGHTS, momentum=0.4), SAID),
        (26, torch.optim.SGD(WEIGHTS, momentum=0.9), []),
        (26, torch.optim.SGD(WEIGHTS, momentum=0.9, dampening=0.9), SAID),
        (26, torch.optim.AdamW(WEIGHTS), []),
    ],
)
def test_it_is_said_once_that_more_than_half_of_fifty_steps_are_short(
    num_short: int, optimizer: torch.optim.Optimizer, said: list[str]
) -> None:
    notices: list[str] = []
    scale = StepScale(optimizer, notices.append)
    for place in range(200):
        if place == 49:
            assert not notices
        scale.add(torch.tensor(0.1 if place % 50 < num_short else 1.0), 0.001)
        scale.add(None, None)
    assert [notice[: len(start)] for notice, start in zip(notices, said, strict=True)] == said
    assert scale.last is None


def gradient_of(strategy: KFACStrategy) -> tuple[torch.Tensor, dict[str, float]]:
    """Of a first step, and what is said of it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with offbeat.attach(net, optimizer, strategy) as session:
        loss_of(net, batch_of(0, 0)).backward()
        optimizer.step()
        gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        return torch.cat(gradients), session.gauges()


@pytest.mark.parametrize("kind", [offbeat.SPDKFAC, offbeat.DPKFAC])
def test_the_gauge_is_what_the_step_was_multiplied_by(kind: type[KFACStrategy]) -> None:
    whole, of_whole = gradient_of(kind(kl_clip=None))
    short, of_short = gradient_of(kind(kl_clip=1e-4))
    assert of_whole == {}
    assert 0 < of_short["kl_scale"] < 0.5
    torch.testing.assert_close(short, whole * of_short["kl_scale"])


def test_all_ranks_say_the_same_of_short_steps() -> None:
    nets = [make_net() for _ in range(2)]

    def work(driver: ThreadDriver) -> list[str]:
        net: nn.Module = nets[driver.rank]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        strategy = offbeat.DPKFAC(kl_clip=1e-6, damping=10.0)
        with session_on(driver, net, optimizer, strategy) as session:
            for step in range(51):
                loss_of(net, batch_of(driver.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            words = "kl_clip=1e-06", "shorter than plain"
            return [notice for word in words for notice in session.notices if word in notice]

    said = results_of(2, work)
    assert len(said[0]) == 2
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("num_short", "optimizer", "grafting", "num_said"),
    [
        (25, torch.optim.SGD(WEIGHTS), "none", 0),
        (26, torch.optim.SGD(WEIGHTS), "none", 1),
        (26, torch.optim.SGD(WEIGHTS, momentum=0.9), "none", 1),
        (26, torch.optim.SGD(WEIGHTS), "floor", 0),
        (26, torch.optim.AdamW(WEIGHTS), "none", 0),
    ],
)
def test_it_is_said_once_that_a_layers_gradients_are_short_in_most_of_fifty_steps(
    num_short: int, optimizer: torch.optim.Optimizer, grafting: Grafting, num_said: int
) -> None:
    notices: list[str] = []
    layers = ShortLayers(optimizer, grafting, notices.append)
    for place in range(200):
        if layers.is_watching:
            assert not notices
            short = torch.tensor(0.25 if place % 50 < num_short else 1.0)
            layers.add({"long": torch.tensor(9.0), "short": short})
    assert not layers.is_watching
    assert len(notices) == num_said
    assert all("1 of K-FAC's 2 layers" in one and "'short' 0.25" in one for one in notices)


def test_a_rate_for_plain_gradients_trains_with_a_floor_and_else_a_notice_says_so() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(800, 20, generator=draw)
    y = x @ torch.randn(20, 1, generator=draw)

    def trained(strategy: Strategy) -> tuple[float, list[str]]:
        torch.manual_seed(0)
        net = nn.Linear(20, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with offbeat.attach(net, optimizer, strategy) as session:
            for batch in range(60):
                some = slice(batch * 16 % 800, batch * 16 % 800 + 16)
                nn.functional.mse_loss(net(x[some]), y[some]).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(net(x), y))
        return loss, [notice for notice in session.notices if "shorter than plain" in notice]

    plain, _ = trained(offbeat.AllReduce())
    short, said = trained(offbeat.SPDKFAC())
    floored, silence = trained(offbeat.SPDKFAC(grafting="floor"))
    assert short > 3 * plain
    assert floored < 1.25 * plain
    assert len(said) == 1
    assert 'grafting="floor"' in said[0]
    assert silence == []
