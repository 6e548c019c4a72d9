"""A GradScaler of which the session does not know is refused, whatever the strategy is."""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.errors import UnsupportedError
from offbeat.strategies.base import Strategy


@pytest.mark.parametrize("strategy", [offbeat.AllReduce(), offbeat.LocalSGD()])
def test_a_scaler_that_was_not_handed_over_is_refused_in_the_first_step(strategy: Strategy) -> None:
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
