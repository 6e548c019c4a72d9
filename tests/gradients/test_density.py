"""The density of an exchange: stages, more while the learning rate rises, and the largest that the
links carry within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typing_extensions import override

import offbeat
from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.errors import ConfigError
from offbeat.gradients.collective_choice import BucketKind, CheapestCollective
from offbeat.gradients.density import (
    DENSITY,
    FIRST,
    HOLD,
    LEAST,
    LIMIT,
    MeasuredDensity,
    RisingRate,
    Warmup,
    affordable_density,
)
from offbeat.transport.single_rank import SingleRank
from thread_support.world import ThreadDriver, results_of, session_on

GRADIENT = BucketKind(num_elements=1_000_000, element_bytes=4)


def network(bytes_per_s: float, latency_s: float = 1e-4) -> NetworkCosts:
    cost = LinkCost(alpha_s=latency_s, beta_s_per_byte=1 / bytes_per_s)
    return NetworkCosts(messages=cost, dense=cost, select_s_per_element=0.0)


def links(bytes_per_s: float, latency_s: float = 1e-4) -> CheapestCollective:
    return CheapestCollective(network(bytes_per_s, latency_s), world_size=4)


def dearest(cheapest: CheapestCollective, density: float) -> float:
    """Seconds of the cheapest sparse exchange at `density`."""
    k = max(1, round(density * GRADIENT.num_elements))
    costs = cheapest.costs_s(GRADIENT, k)
    return min(cost for name, cost in costs.items() if name != "dense")


@given(
    bytes_per_s=st.floats(1e5, 1e11),
    allowed_s=st.floats(1e-4, 10.0),
)
def test_it_is_the_largest_that_is_affordable(bytes_per_s: float, allowed_s: float) -> None:
    cheapest = links(bytes_per_s)
    density = affordable_density(
        lambda k: cheapest.costs_s(GRADIENT, k),
        num_elements=GRADIENT.num_elements,
        allowed_s=allowed_s,
    )
    allowed_s = max(allowed_s, 1.5 * dearest(cheapest, LEAST))
    is_dense_affordable = cheapest.costs_s(GRADIENT, 1)["dense"] <= allowed_s
    assert (density == 1.0) == is_dense_affordable
    if not is_dense_affordable:
        assert LEAST <= density < 1.0
        assert density == LEAST or dearest(cheapest, density) <= allowed_s
        assert density * 1.25 >= 1.0 or dearest(cheapest, density * 1.25) > allowed_s


def test_where_latency_is_all_that_costs_entries_are_not_withheld() -> None:
    """A message takes 2 ms, of which the least density's entries are a hundredth."""
    cheapest = links(1e8, latency_s=2e-3)
    density = affordable_density(
        lambda k: cheapest.costs_s(GRADIENT, k),
        num_elements=GRADIENT.num_elements,
        allowed_s=1e-4,
    )
    assert density > 10 * LEAST
    assert dearest(cheapest, density) <= 1.5 * dearest(cheapest, LEAST)


def test_on_fast_links_a_processor_bounds_how_many_entries_travel() -> None:
    """100,000 of them would take it 5 ms and more, and the links a twentieth of that."""
    fast = replace(network(1.25e9), dense=LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8))
    densities = [
        affordable_density(
            lambda k, costs=costs: CheapestCollective(costs, world_size=4).costs_s(GRADIENT, k),
            num_elements=GRADIENT.num_elements,
            allowed_s=5e-3,
        )
        for costs in (fast, replace(fast, entry_s=5e-8))
    ]
    assert densities[0] > 0.3
    assert 0.05 < densities[1] < 0.1


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Timed(SingleRank):
    """A world of one by such a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def now_s(self, channel: int) -> float:
        return self._clock()


def exchanges(auto: MeasuredDensity, clock: Clock, *, count: int, compute_s: float) -> None:
    for _ in range(count):
        clock.seconds += compute_s
        auto.listener.on_bucket_sealed(0, is_last=True, failed=False)
        clock.seconds += 5.0  # what the exchange itself takes does not count
        auto.listener.on_exchange_settled(good=True)


def auto_density(cheapest: CheapestCollective, clock: Clock, remarks: list[str]) -> MeasuredDensity:
    notices = Notices(0)
    notices.kept = remarks
    context = Context(
        parameters={}, driver=Timed(clock), new_stream=stream_counter(), notices=notices
    )
    return MeasuredDensity(cheapest, context, gradient=GRADIENT, warmup=None)


def test_it_follows_the_time_between_exchanges() -> None:
    clock, remarks = Clock(), list[str]()
    cheapest = links(1e9 / 8)
    auto = auto_density(cheapest, clock, remarks)
    assert auto.target == FIRST
    exchanges(auto, clock, count=200, compute_s=0.05)
    early = auto.target
    assert dearest(cheapest, early) <= 0.005 < dearest(cheapest, early * 1.25)
    exchanges(auto, clock, count=300, compute_s=0.3)
    later = auto.target
    assert early < later < 1.0
    assert dearest(cheapest, later) <= 0.03
    exchanges(auto, clock, count=500, compute_s=10.0)
    assert auto.target == 1.0
    assert [remark.split()[0] for remark in remarks] == ['density="auto"'] * len(remarks)
    assert "to send everything after 1000 exchanges" in remarks[-1]


def test_the_first_exchanges_may_cost_ten_times_as_much_and_the_next_ones_less_and_less() -> None:
    clock, remarks = Clock(), list[str]()
    cheapest = links(1e9 / 8)
    auto = auto_density(cheapest, clock, remarks)
    exchanges(auto, clock, count=4, compute_s=0.02)
    warm = auto.target
    assert dearest(cheapest, warm) <= 0.02 < dearest(cheapest, warm * 1.25)
    assert "which is 100% of the 20.0 ms between exchanges until exchange 100" in remarks[-1]
    exchanges(auto, clock, count=95, compute_s=0.02)
    assert auto.target == warm
    exchanges(auto, clock, count=1, compute_s=0.02)
    assert "which is 50% of the 20.0 ms between exchanges until exchange 150" in remarks[-1]
    densities = [warm, auto.target]
    for _ in range(2):
        exchanges(auto, clock, count=50, compute_s=0.02)
        densities.append(auto.target)
    assert all(after < before / 1.5 for before, after in pairwise(densities))
    assert "which is 10% of the 20.0 ms between exchanges" in remarks[-1]


def test_a_small_change_is_not_worth_it() -> None:
    clock, remarks = Clock(), list[str]()
    auto = auto_density(links(1e9 / 8), clock, remarks)
    exchanges(auto, clock, count=200, compute_s=0.1)
    before, so_far = auto.target, len(remarks)
    exchanges(auto, clock, count=300, compute_s=0.105)
    assert auto.target == before
    assert len(remarks) == so_far


def test_a_resumed_run_begins_with_the_density_of_the_first() -> None:
    clock = Clock()
    first = auto_density(links(1e9 / 8), clock, [])
    exchanges(first, clock, count=4, compute_s=1.0)
    second = auto_density(links(1e6), Clock(), [])
    second.load_state_dict(first.state_dict())
    assert second.target == first.target != FIRST


def test_a_look_right_after_a_resume_keeps_the_density() -> None:
    """Nothing has been measured then, and that is not a step that takes no time."""
    clock, remarks = Clock(), list[str]()
    auto = auto_density(links(1e9 / 8), clock, remarks)
    auto.load_state_dict(
        {"replicated": auto.state_dict()["replicated"] | {"density": 0.2, "num_exchanges": 499}}
    )
    exchanges(auto, clock, count=1, compute_s=1.0)
    assert auto.target == 0.2
    assert not remarks


def test_alone_it_sends_nothing_and_owes_nothing() -> None:
    """In a world of one an exchange costs nothing."""
    cheapest = CheapestCollective(links(1e6).network, world_size=1)
    clock = Clock()
    auto = auto_density(cheapest, clock, [])
    exchanges(auto, clock, count=4, compute_s=0.001)
    assert auto.target == 1.0


def test_what_knows_no_costs_refuses_it() -> None:
    with pytest.raises(ConfigError, match="density of TopK: got 'auto'; allowed is number"):
        offbeat.TopK(density="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="density is the fraction"):
        offbeat.GTopK(density=0.0)


def test_stages_last_as_long_as_they_say() -> None:
    for warmup in (Warmup.of([(1.0, 2), [0.25, 3]]), Warmup.of("1.0x2+0.25x3")):
        densities = [warmup.density_at(step, 0.01) for step in range(7)]
        assert densities == [1.0, 1.0, 0.25, 0.25, 0.25, 0.01, 0.01]


def test_no_stage_is_below_the_target() -> None:
    warmup = Warmup.of([(0.5, 1), (0.01, 1)])
    assert [warmup.density_at(step, 0.1) for step in range(3)] == [0.5, 0.1, 0.1]


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


def test_a_rise_that_began_early_raises_the_density_to_its_end() -> None:
    """As over the thousands of steps in which large models warm up."""
    rates = [0.001 * step for step in range(1, 2 * LIMIT)]
    found = densities([*rates, *[rates[-1]] * 100])
    raised = [place for place, density in enumerate(found) if density == DENSITY]
    assert raised == list(range(1, len(rates) - 1 + HOLD))
