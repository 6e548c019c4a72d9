"""The automatic density is the largest that the links carry within the budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.errors import ConfigError
from offbeat.gradients.collective_choice import BucketKind, CheapestCollective
from offbeat.gradients.density_choice import FIRST, LEAST, AutoDensity, affordable_density
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank

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


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def exchanges(auto: AutoDensity, clock: Clock, *, count: int, compute_s: float) -> None:
    for _ in range(count):
        clock.seconds += compute_s
        auto.intervals.on_bucket_sealed(0, is_last=True, failed=False)
        clock.seconds += 5.0  # what the exchange itself takes does not count
        auto.intervals.on_exchange_settled(good=True)


def auto_density(cheapest: CheapestCollective, clock: Clock, remarks: list[str]) -> AutoDensity:
    return AutoDensity(
        cheapest,
        gradient=GRADIENT,
        budget=0.1,
        driver=SingleRank(),
        stream=Stream(0),
        inform=remarks.append,
        now_s=clock,
    )


def test_it_follows_the_time_between_exchanges() -> None:
    clock, remarks = Clock(), list[str]()
    cheapest = links(1e9 / 8)
    auto = auto_density(cheapest, clock, remarks)
    assert auto.density == FIRST
    exchanges(auto, clock, count=200, compute_s=0.05)
    early = auto.density
    assert dearest(cheapest, early) <= 0.005 < dearest(cheapest, early * 1.25)
    exchanges(auto, clock, count=300, compute_s=0.3)
    later = auto.density
    assert early < later < 1.0
    assert dearest(cheapest, later) <= 0.03
    exchanges(auto, clock, count=500, compute_s=10.0)
    assert auto.density == 1.0
    assert [remark.split()[0] for remark in remarks] == ['density="auto"'] * len(remarks)
    assert "to send everything after 1000 exchanges" in remarks[-1]


def test_the_first_exchanges_may_cost_ten_times_as_much_and_the_next_ones_less_and_less() -> None:
    clock, remarks = Clock(), list[str]()
    cheapest = links(1e9 / 8)
    auto = auto_density(cheapest, clock, remarks)
    exchanges(auto, clock, count=4, compute_s=0.02)
    warm = auto.density
    assert dearest(cheapest, warm) <= 0.02 < dearest(cheapest, warm * 1.25)
    assert "which is 100% of the 20.0 ms between exchanges until exchange 100" in remarks[-1]
    exchanges(auto, clock, count=95, compute_s=0.02)
    assert auto.density == warm
    exchanges(auto, clock, count=1, compute_s=0.02)
    assert "which is 50% of the 20.0 ms between exchanges until exchange 150" in remarks[-1]
    densities = [warm, auto.density]
    for _ in range(2):
        exchanges(auto, clock, count=50, compute_s=0.02)
        densities.append(auto.density)
    assert all(after < before / 1.5 for before, after in pairwise(densities))
    assert "which is 10% of the 20.0 ms between exchanges" in remarks[-1]


def test_a_small_change_is_not_worth_it() -> None:
    clock, remarks = Clock(), list[str]()
    auto = auto_density(links(1e9 / 8), clock, remarks)
    exchanges(auto, clock, count=200, compute_s=0.1)
    before, so_far = auto.density, len(remarks)
    exchanges(auto, clock, count=300, compute_s=0.105)
    assert auto.density == before
    assert len(remarks) == so_far


@pytest.mark.parametrize(
    ("times_slower", "compute_s", "follows"),
    [(20.0, 0.1, True), (1.2, 0.1, False), (20.0, 0.001, False)],
    ids=["slower", "as measured", "no time to measure"],
)
def test_links_that_change_later_are_noticed(
    times_slower: float, compute_s: float, follows: bool
) -> None:
    """Steps of 0.1 s leave half a second of 500 steps for measuring, which takes 0.3 s here."""
    clock, remarks = Clock(), list[str]()
    measured, later = network(1e9 / 8), network(1e9 / 8 / times_slower)
    cheapest = CheapestCollective(
        measured, world_size=4, inform=remarks.append, measured_again=lambda: later
    )
    auto = auto_density(cheapest, clock, remarks)
    exchanges(auto, clock, count=499, compute_s=compute_s)
    before = auto.density
    exchanges(auto, clock, count=1, compute_s=compute_s)
    assert (auto.density < before / 5) == follows
    assert cheapest.network == (later if follows else measured)
    assert any("links have changed" in remark for remark in remarks) == follows


def test_a_resumed_run_begins_with_the_density_of_the_first() -> None:
    clock = Clock()
    first = auto_density(links(1e9 / 8), clock, [])
    exchanges(first, clock, count=4, compute_s=1.0)
    second = auto_density(links(1e6), Clock(), [])
    second.load_state_dict(first.state_dict())
    assert second.density == first.density != FIRST


def test_a_look_right_after_a_resume_keeps_the_density() -> None:
    """Nothing has been measured then, and that is not a step that takes no time."""
    clock, remarks = Clock(), list[str]()
    auto = auto_density(links(1e9 / 8), clock, remarks)
    auto.load_state_dict({"replicated": {"density": 0.2, "num_exchanges": 499}})
    exchanges(auto, clock, count=1, compute_s=1.0)
    assert auto.density == 0.2
    assert not remarks


def test_alone_it_sends_nothing_and_owes_nothing() -> None:
    """In a world of one an exchange costs nothing."""
    cheapest = CheapestCollective(links(1e6).network, world_size=1)
    clock = Clock()
    auto = auto_density(cheapest, clock, [])
    exchanges(auto, clock, count=4, compute_s=0.001)
    assert auto.density == 1.0


def test_what_knows_no_costs_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"topk has no density='auto'; pass a number"):
        offbeat.TopK(density="auto")
    with pytest.raises(ConfigError, match="variant='paper' has no density='auto'"):
        offbeat.GTopK(collective="tree", variant="paper")
    with pytest.raises(ConfigError, match="budget must be greater than 0"):
        offbeat.GTopK(budget=0.0)
    with pytest.raises(ConfigError, match="budget must be greater than 0, got 'little'"):
        offbeat.GTopK(budget="little")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="density is the fraction"):
        replace(offbeat.GTopK(), density=0.0)
