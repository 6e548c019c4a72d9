"""Who inverts which factor, and what that costs."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _models.kfac_iteration import factor_dims
from _models.kfac_published import as_printed, fitted_to_baselines, resnet50
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.costs import LARGEST_DIM, MAX_SIZES, inversion_clock, measure, sizes_to_time
from offbeat.kfac.placement import (
    SAME_LENGTH_FACTOR,
    InverseCosts,
    TabledInversion,
    by_every_rank,
    fused_messages,
    least_loaded,
    packed_bytes,
    place_by_rule,
    place_for_shortest_phase,
    placement_time,
    round_robin,
)
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank
from offbeat_lab.plan.profile import PolynomialInversion

# Placement covers every factor once, is balanced, and is not expected to be slower than all by
# all.


loads_of_factors = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=60)
dims_of_factors = st.lists(st.integers(1, 3000), min_size=1, max_size=40)
world_sizes = st.integers(1, 20)


def made_costs(
    a: float,
    c: float,
    alpha_s: float,
    beta_s: float,
    gap: float,
    pipelined: bool,
    fused: bool = False,
) -> InverseCosts:
    return InverseCosts(
        inversion=PolynomialInversion(constant_s=a, square_s=0.0, cube_s=c),
        broadcast=Channel(
            link=LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s), gap_s=gap * alpha_s
        ),
        pipelined=pipelined,
        fused=fused,
    )


costs_of_clusters = st.builds(
    made_costs,
    st.floats(0, 1e-2),
    st.floats(0, 1e-10),
    st.floats(0, 1e-1),
    st.floats(0, 1e-7),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)


def sums(loads: list[float], owners: tuple[int, ...], world_size: int) -> list[float]:
    shares: list[float] = np.bincount(owners, weights=loads, minlength=world_size).tolist()
    return shares


@given(loads_of_factors, world_sizes)
def test_the_largest_sum_is_within_grahams_bound(loads: list[float], world_size: int) -> None:
    busiest = max(sums(loads, least_loaded(loads, world_size), world_size))
    assert busiest <= sum(loads) / world_size + (1 - 1 / world_size) * max(loads) + 1e-6


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_sum_is_within_four_thirds_of_the_least_possible(
    loads: list[float], world_size: int
) -> None:
    busiest = max(sums(loads, least_loaded(loads, world_size), world_size))
    best = min(
        max(sums(loads, owners, world_size))
        for owners in product(range(world_size), repeat=len(loads))
    )
    assert busiest <= (4 / 3 - 1 / (3 * world_size)) * best + 1e-9


@pytest.mark.parametrize("world_size", [64, 1024])
def test_many_factors_on_many_ranks_are_balanced(world_size: int) -> None:
    loads = (
        (np.random.default_rng(0).integers(64, 512, 40 * world_size) ** 3).astype(float).tolist()
    )
    shares = sums(loads, least_loaded(loads, world_size), world_size)
    assert max(shares) <= sum(loads) / world_size + max(loads)
    assert max(shares) <= 1.01 * sum(loads) / world_size


@pytest.mark.parametrize("world_size", [64, 1024])
def test_more_ranks_than_factors_means_one_each(world_size: int) -> None:
    dims = list(range(100, 160))
    costs = made_costs(0.0, 1e-9, 0.0, 0.0, 0.0, True)
    owners = place_for_shortest_phase(dims, world_size, costs)
    assert len(set(owners)) == len(dims)
    assert all(owner is not None and 0 <= owner < world_size for owner in owners)


@given(dims_of_factors, world_sizes, costs_of_clusters)
def test_balanced_is_as_short_as_the_alternatives_and_inverts_no_more_than_those_that_are(
    dims: list[int], world_size: int, costs: InverseCosts
) -> None:
    found = placement_time(
        place_for_shortest_phase(dims, world_size, costs), dims, world_size, costs
    )
    others = [
        by_every_rank(len(dims)),
        round_robin(len(dims), world_size),
        place_by_rule(dims, world_size, costs),
    ]
    for other in (
        placement_time(owners, dims, world_size, costs) for owners in others if world_size > 1
    ):
        assert found.total_s <= SAME_LENGTH_FACTOR * other.total_s * (1 + 1e-12)
        assert found.total_s <= other.total_s or found.computing_s <= other.computing_s


@given(dims_of_factors, world_sizes, costs_of_clusters)
def test_the_published_rule_compares_each_factor_alone(
    dims: list[int], world_size: int, costs: InverseCosts
) -> None:
    owners = place_by_rule(dims, world_size, costs)
    for dim, owner in zip(dims, owners, strict=True):
        send_s = costs.broadcast.link.time_s(num_messages=1, num_bytes=packed_bytes(dim))
        assert (owner is None) == (costs.inversion.time_s(dim) < send_s or world_size == 1)


@given(dims_of_factors, world_sizes, costs_of_clusters)
def test_a_phase_lies_between_its_bounds(
    dims: list[int], world_size: int, costs: InverseCosts
) -> None:
    times_s = [costs.inversion.time_s(dim) for dim in dims]
    for owners in (
        by_every_rank(len(dims)),
        round_robin(len(dims), world_size),
        place_for_shortest_phase(dims, world_size, costs),
    ):
        phase = placement_time(owners, dims, world_size, costs)
        lowest_s = max(max(times_s), sum(times_s) / world_size)
        assert lowest_s * (1 - 1e-9) <= phase.computing_s <= sum(times_s) * (1 + 1e-9)
        sent_s = sum(
            costs.broadcast.link.time_s(num_messages=1, num_bytes=packed_bytes(dim))
            for dim, owner in zip(dims, owners, strict=True)
            if owner is not None
        )
        assert 0.0 <= phase.exposed_s <= sent_s + 1e-9


@given(dims_of_factors, st.integers(2, 20), costs_of_clusters)
def test_sending_while_inverting_is_never_slower(
    dims: list[int], world_size: int, costs: InverseCosts
) -> None:
    in_sequence = InverseCosts(
        inversion=costs.inversion, broadcast=costs.broadcast, pipelined=False
    )
    pipelined = InverseCosts(inversion=costs.inversion, broadcast=costs.broadcast, pipelined=True)
    owners = round_robin(len(dims), world_size)
    apart = placement_time(owners, dims, world_size, in_sequence).total_s
    assert placement_time(owners, dims, world_size, pipelined).total_s <= apart + 1e-9


def test_alone_everything_is_inverted_and_nothing_sent() -> None:
    costs = made_costs(0.0, 1.0, 0.0, 0.0, 0.0, True)
    assert (
        place_for_shortest_phase([3, 4], 1, costs)
        == place_by_rule([3, 4], 1, costs)
        == (None, None)
    )
    assert placement_time((None, None), [3, 4], 1, costs).total_s == 27 + 64
    assert placement_time((0, 0), [3, 4], 1, costs).exposed_s == 0.0


def test_a_phase_by_hand() -> None:
    """Rank 0 inverts 2 rows (8 s) and sends 12 bytes; rank 1 inverts one row (1 s) and sends 4;
    then all invert 3 rows.
    """
    costs = made_costs(0.0, 1.0, 1.0, 1.0, 1.0, True)
    phase = placement_time((0, 1, None), [2, 1, 3], 2, costs)
    assert (phase.computing_s, phase.exposed_s) == (8 + 27, 0.0)
    phase = placement_time((0, 1), [2, 1], 2, costs)
    assert (phase.computing_s, phase.total_s) == (8.0, 8 + 1 + 12)


@given(dims_of_factors, world_sizes, costs_of_clusters)
def test_messages_hold_an_owners_inverses_once_and_in_order(
    dims: list[int], world_size: int, costs: InverseCosts
) -> None:
    messages = fused_messages(dims, world_size, costs)
    assert [place for message in messages for place in message] == list(range(len(dims)))
    assert costs.fused or len(messages) == len(dims)


def test_what_is_large_travels_while_what_is_small_is_inverted() -> None:
    """The first takes 64 s to invert, the others 1 s each; on each of two ranks a message costs 4 s
    and 0.1 s a byte.
    """
    costs, apart = (
        made_costs(0.0, 1.0, 4.0, 0.1, 1.0, True, fused=fused) for fused in (True, False)
    )
    assert fused_messages([4, 1, 1], 2, costs) == [[0, 1, 2]], (
        "alone, the first would take until the others are long done"
    )
    dims, owners = [4] + [1] * 20, (0,) * 21
    assert fused_messages(dims, 2, costs) == [[0, 1, 2], list(range(3, 21))]
    assert placement_time(owners, dims, 2, costs).total_s == pytest.approx(84 + 4 + 0.1 * 18 * 4)
    assert placement_time(owners, dims, 2, apart).total_s == pytest.approx(
        64 + 4 + 4 + 20 * (4 + 0.4)
    )


def test_among_phases_as_short_the_one_with_less_inverting_is_taken() -> None:
    """Eight equal factors on eight ranks: to invert all takes 8 s, to invert one and send it 1 s
    and eight times 0.88 s.
    """
    costs = made_costs(1.0, 0.0, 0.88, 0.0, 1.0, True)
    assert placement_time(by_every_rank(8), [1] * 8, 8, costs).total_s == 8.0
    assert None not in place_for_shortest_phase([1] * 8, 8, costs)
    assert place_for_shortest_phase(
        [1] * 8, 8, made_costs(1.0, 0.0, 1.0, 0.0, 1.0, True)
    ) == by_every_rank(8)


def test_free_broadcasts_are_used_and_dear_ones_avoided() -> None:
    dims = [500] * 8
    assert None not in place_for_shortest_phase(dims, 4, made_costs(0.0, 1e-9, 0.0, 0.0, 0.0, True))
    assert place_for_shortest_phase(
        dims, 4, made_costs(0.0, 1e-12, 1.0, 1e-6, 1.0, True)
    ) == by_every_rank(8)


@pytest.mark.parametrize("world_size", [4, 64, 1024])
def test_resnet50_is_dealt_alike_on_every_rank_and_no_worse_than_all_by_all(
    world_size: int,
) -> None:
    dims = factor_dims(resnet50())
    for costs in (as_printed(latencies_overlap=False).inverse, fitted_to_baselines().inverse):
        owners = place_for_shortest_phase(dims, world_size, costs)
        assert owners == place_for_shortest_phase(list(dims), world_size, costs)
        everyone_s = placement_time(by_every_rank(len(dims)), dims, world_size, costs).total_s
        assert (
            placement_time(owners, dims, world_size, costs).total_s
            <= SAME_LENGTH_FACTOR * everyone_s
        )


def test_the_largest_factor_bounds_what_more_ranks_can_gain() -> None:
    """With d^3 as cost and load, 8 ranks have the largest inverse as their critical path, and so
    have 1,024.
    """
    dims = factor_dims(resnet50())
    costs = made_costs(0.0, 1e-12, 0.0, 0.0, 0.0, True)
    largest_s = costs.inversion.time_s(max(dims))
    computing_s = {
        world_size: placement_time(
            place_for_shortest_phase(dims, world_size, costs), dims, world_size, costs
        ).computing_s
        for world_size in (4, 8, 64, 1024)
    }
    assert computing_s[4] > 1.1 * largest_s
    assert computing_s[8] == computing_s[64] == computing_s[1024] == largest_s


# What is timed stands for what the model has.


@given(st.lists(st.integers(1, 3 * LARGEST_DIM), min_size=1, max_size=40))
def test_the_sizes_that_are_timed_are_the_models_own(dims: list[int]) -> None:
    sizes = sizes_to_time(dims)
    own = {min(dim, LARGEST_DIM) for dim in dims}
    assert sizes == sorted(set(sizes))
    assert set(sizes) <= own
    assert len(sizes) == min(len(own), MAX_SIZES)
    assert (sizes[0], sizes[-1]) == (min(own), max(own))


def test_costs_are_a_table_of_what_was_timed() -> None:
    timed: list[int] = []
    costs = measure(
        SingleRank(),
        Stream(1),
        dims=[3, 5, 3],
        like=torch.zeros(0),
        invert=lambda matrix: timed.append(matrix.shape[0]),
    )
    assert sorted(set(timed)) == [3, 5]
    assert isinstance(costs.inverse.inversion, TabledInversion)
    assert costs.inverse.inversion.dims == (3, 5)
    assert costs.inverse.fused


def test_a_processors_time_counts_where_ranks_may_share_one() -> None:
    assert inversion_clock(torch.device("cpu"), time.monotonic) is time.thread_time
    assert inversion_clock(torch.device("cuda"), time.monotonic) is time.monotonic
