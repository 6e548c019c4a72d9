"""By what steps are shortened, and what that means at a rate for plain gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from kfac_support.reference import batch_of, loss_of, make_net


def gradient_of(strategy: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Of a first step, and what is said of it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with offbeat.attach(net, optimizer, strategy) as session:
        loss_of(net, batch_of(0, 0)).backward()
        optimizer.step()
        gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        return torch.cat(gradients), session.gauges()


@pytest.mark.parametrize("kind", [offbeat.SPDKFAC, offbeat.DPKFAC])
def test_the_gauge_is_what_the_step_was_multiplied_by(kind: type[Any]) -> None:
    whole, of_whole = gradient_of(kind(kl_clip=None))
    short, of_short = gradient_of(kind(kl_clip=1e-4))
    assert of_whole == {}
    assert 0 < of_short["kl_scale"] < 0.5
    torch.testing.assert_close(short, whole * of_short["kl_scale"])


def test_a_rate_for_plain_gradients_trains_with_a_floor_and_hardly_without() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(800, 20, generator=draw)
    y = x @ torch.randn(20, 1, generator=draw)

    def trained(strategy: Any) -> float:
        torch.manual_seed(0)
        net = nn.Linear(20, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with offbeat.attach(net, optimizer, strategy):
            for batch in range(60):
                some = slice(batch * 16 % 800, batch * 16 % 800 + 16)
                nn.functional.mse_loss(net(x[some]), y[some]).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            return float(nn.functional.mse_loss(net(x), y))

    plain = trained(offbeat.AllReduce())
    assert trained(offbeat.SPDKFAC()) > 3 * plain
    assert trained(offbeat.SPDKFAC(grafting="floor")) < 1.25 * plain


@pytest.mark.parametrize("kind", [offbeat.SPDKFAC, offbeat.DPKFAC])
def test_what_another_optimizer_steps_has_plain_gradients(kind: type[Any]) -> None:
    net, plain = make_net(), make_net()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.5)
    with offbeat.attach(net, optimizer, kind(kl_clip=None)):
        loss_of(net, batch_of(0, 0)).backward()
        optimizer.step()
    loss_of(plain, batch_of(0, 0)).backward()
    torch.testing.assert_close(net[5].weight.grad, plain[5].weight.grad)
    assert not torch.allclose(net[0].weight.grad, plain[0].weight.grad)
