"""While the learning rate rises, more entries travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import offbeat
from offbeat.gradients.rising_rate import DENSITY, HOLD, LIMIT, RisingRate
from thread_support.world import ThreadDriver, results_of, session_on

SIZE = 400


def densities(rates: Sequence[float], *, first: int = 0) -> list[float]:
    rising, found = RisingRate(), []
    for exchange, rate in enumerate(rates, start=first):
        for _bucket in range(2):
            rising.look(exchange, rate)
        found.append(rising.density_at(exchange, 0.01))
    return found


def test_a_constant_or_falling_rate_changes_nothing() -> None:
    assert set(densities([0.1] * 5 + [0.05] * 5)) == {0.01}


@pytest.mark.parametrize("first_rate", [0.0, 0.001])
def test_the_density_is_raised_while_the_rate_rises_and_a_while_after(first_rate: float) -> None:
    rates = [first_rate, *(0.01 * step for step in range(1, 31)), *[0.3] * 100]
    found = densities(rates)
    raised = [place for place, density in enumerate(found) if density == DENSITY]
    # A rise is known when two rates above 0 have been seen.
    assert raised == list(range(2 if first_rate == 0.0 else 1, 30 + HOLD))


def test_a_rate_that_rises_late_changes_nothing() -> None:
    assert set(densities([0.1, 0.2, 0.3], first=LIMIT)) == {0.01}


def test_a_density_above_that_of_the_warm_up_stays() -> None:
    rising = RisingRate(rate=0.1, until=5)
    assert rising.density_at(0, 0.5) == 0.5


@pytest.mark.parametrize("target", [0.02, 0.01, 0.004, 0.001, 0.0001])
def test_the_density_falls_and_is_the_wanted_one_before_an_entry_has_waited(target: float) -> None:
    rising = RisingRate(until=HOLD)
    last = max(HOLD, math.ceil(1 / target))
    found = [rising.density_at(exchange, target) for exchange in range(last + 1)]
    assert found[0] == DENSITY
    assert found[last] == target
    assert found == sorted(found, reverse=True)
    # All that is sent besides is worth so many dense exchanges at most, however small the density.
    assert sum(found) - target * len(found) < 31


def trained(rates: Sequence[float], warmup: str | None) -> list[int]:
    """How many entries are applied in each step."""
    models = [nn.Linear(SIZE, 1, bias=False) for _ in range(2)]

    def rank(driver: ThreadDriver) -> list[int]:
        model = models[driver.rank]
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[0])
        strategy = offbeat.TopK(density=0.01, warmup=warmup)
        applied = []
        with session_on(driver, model, optimizer, strategy):
            for step, rate in enumerate(rates):
                optimizer.param_groups[0]["lr"] = rate
                draw = torch.Generator().manual_seed(step)  # the same on both ranks
                model(torch.randn(1, SIZE, generator=draw)).sum().backward()
                assert model.weight.grad is not None
                applied.append(int(model.weight.grad.count_nonzero()))
                optimizer.step()
                optimizer.zero_grad()
        return applied

    return results_of(2, rank)[0]


def test_a_strategy_sends_more_while_its_optimizers_rate_rises() -> None:
    few, many = math.ceil(0.01 * SIZE), math.ceil(DENSITY * SIZE)
    assert trained([0.1, 0.2, 0.3], "auto") == [few, many, many]
    assert trained([0.1, 0.2, 0.3], None) == [few] * 3
