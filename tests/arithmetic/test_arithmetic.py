"""Costs, fusion, groups, topologies and trees against their formulas."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from _models.kfac_iteration import fit_inversion
from _models.kfac_published import ExponentialInversion
from offbeat.arithmetic.costs import Channel, LinkCost, fit_link
from offbeat.arithmetic.groups import VersionGroup, group_of_version, groups, num_groups
from offbeat.arithmetic.topologies import exponential_hops, exponential_peers, ring_weights
from offbeat.arithmetic.trees import broadcast_rounds, num_rounds, reduce_rounds
from offbeat.codec.sparse import OWNER_BLOCK, owner_of
from offbeat.errors import ConfigError
from offbeat.gradients.buckets import fuse
from offbeat.kfac.placement import InversionCost, TabledInversion, slowest
from offbeat_lab.plan.profile import PolynomialInversion

# Fits find the costs that the durations were made from; hiccups and nonsense do not get in.


sizes = st.lists(st.integers(1, 10**8), min_size=2, max_size=20, unique=True)
coefficients = st.floats(1e-9, 1.0)
dims = st.lists(st.integers(1, 5000), min_size=3, max_size=20, unique=True)


@given(sizes, coefficients, coefficients)
def test_the_fit_of_an_exact_link_repeats_its_durations(
    sizes: list[int], alpha_s: float, beta_s: float
) -> None:
    link = LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s)
    timed = [(size, link.time_s(num_messages=1, num_bytes=size)) for size in sizes]
    fitted = fit_link(timed)
    for size, seconds in timed:
        assert fitted.time_s(num_messages=1, num_bytes=size) == pytest.approx(seconds, rel=1e-6)


@given(dims, coefficients, coefficients, coefficients)
def test_the_fit_of_an_exact_polynomial_repeats_its_durations(
    dims: list[int], a: float, b: float, c: float
) -> None:
    cost = PolynomialInversion(constant_s=a, square_s=b, cube_s=c)
    fitted = fit_inversion([(dim, cost.time_s(dim)) for dim in dims])
    for dim in dims:
        assert fitted.time_s(dim) == pytest.approx(cost.time_s(dim), rel=1e-5)


@given(st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 1e3), min_size=3, max_size=12))
def test_a_fitted_cost_is_positive_and_grows(timed: dict[int, float]) -> None:
    fitted = fit_inversion(timed.items())
    times_s = [fitted.time_s(dim) for dim in (1, 10, 100, 1000, 10_000)]
    assert times_s == sorted(times_s)
    assert times_s[-1] > 0


def test_a_hiccup_among_repetitions_does_not_tilt_the_fit() -> None:
    calm = [(size, 1e-3 + 1e-8 * size) for size in (1_000, 100_000, 10_000_000)]
    hiccup = [*calm * 3, (1_000, 5.0)]
    assert fit_link(hiccup).alpha_s == pytest.approx(1e-3)


def test_short_durations_count_as_much_as_long_ones() -> None:
    """Least squares of absolute errors would let the 2% error of the largest matrix swallow the
    smallest.
    """
    fitted = fit_inversion(
        [(64, 1e-4), (512, 1e-4 + 1e-11 * 512**3), (4096, 1.02 * 1e-11 * 4096**3)]
    )
    assert fitted.time_s(64) == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("timed", "complaint"),
    [
        ([(10, 1.0), (10, 2.0)], "1 sizes were timed"),
        ([(10, 0.0), (20, 1.0)], "size 10 took 0.0 s"),
    ],
)
def test_what_cannot_be_fitted_is_refused(timed: list[tuple[int, float]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fit_link(timed)


@given(
    st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 1e3), min_size=1, max_size=12),
    st.integers(1, 20_000),
)
def test_a_table_says_what_was_measured_and_stays_between(
    timed: dict[int, float], dim: int
) -> None:
    known = sorted(timed)
    table = TabledInversion(dims=tuple(known), seconds=tuple(timed[size] for size in known))
    assert all(table.time_s(size) == pytest.approx(timed[size]) for size in known)
    if known[0] <= dim <= known[-1]:
        neighbours = [
            timed[max(size for size in known if size <= dim)],
            timed[min(size for size in known if size >= dim)],
        ]
        assert min(neighbours) * (1 - 1e-9) <= table.time_s(dim) <= max(neighbours) * (1 + 1e-9)


def test_beyond_the_table_cubes_take_over() -> None:
    assert TabledInversion(dims=(10, 100), seconds=(1.0, 2.0)).time_s(200) == 16.0


@pytest.mark.parametrize(
    ("dims", "seconds"), [((), ()), ((5, 5), (1.0, 1.0)), ((5, 6), (1.0,)), ((5,), (0.0,))]
)
def test_tables_that_are_none_are_refused(
    dims: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError, match="of the table are"):
        TabledInversion(dims=dims, seconds=seconds)


@given(st.lists(st.dictionaries(st.integers(1, 9), st.floats(1e-6, 1.0)), min_size=1, max_size=5))
def test_ranks_agree_whatever_they_measured(samples: list[dict[int, float]]) -> None:
    agreed = slowest(samples)
    assert slowest(reversed(samples)) == agreed
    assert all(agreed[dim] >= seconds for measured in samples for dim, seconds in measured.items())


def test_every_kind_of_cost_can_stand_for_another() -> None:
    costs: list[InversionCost] = [
        ExponentialInversion(alpha_s=1.0, beta_per_row=0.0),
        PolynomialInversion(constant_s=1.0, square_s=0.0, cube_s=0.0),
        TabledInversion(dims=(1, 2), seconds=(1.0, 1.0)),
    ]
    assert [cost.time_s(2) for cost in costs] == [1.0, 1.0, 1.0]


messages = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100)), min_size=1, max_size=10)


@given(messages, st.floats(0, 1))
def test_a_channel_lies_between_messages_in_sequence_and_bare_bytes(
    messages: list[tuple[float, int]], part: float
) -> None:
    link = LinkCost(alpha_s=0.5, beta_s_per_byte=0.01)
    in_sequence, overlapping, between = (
        Channel(link=link, gap_s=gap_s).last_arrival_s(messages)
        for gap_s in (link.alpha_s, 0.0, part * link.alpha_s)
    )
    assert overlapping - 1e-9 <= between <= in_sequence + 1e-9
    last_ready_s = max(ready_s for ready_s, _ in messages)
    bytes_s = 0.01 * sum(num_bytes for _, num_bytes in messages)
    assert max(last_ready_s, bytes_s) + link.alpha_s <= overlapping + 1e-9
    assert in_sequence <= last_ready_s + bytes_s + link.alpha_s * len(messages) + 1e-9


def test_a_gap_is_a_part_of_alpha() -> None:
    with pytest.raises(ConfigError, match="gap_s is 2.0"):
        Channel(link=LinkCost(alpha_s=1.0, beta_s_per_byte=0.0), gap_s=2.0)


# Fusion covers every parameter once, keeps kinds apart and respects the cap; ownership is
# balanced.


parameters = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), min_size=1, max_size=40)


@given(parameters, st.integers(1, 100), st.integers(1, 100))
def test_every_parameter_is_in_exactly_one_bucket(
    drawn: list[tuple[int, str]], cap: int, first_cap: int
) -> None:
    buckets = fuse(
        [size for size, _ in drawn],
        [kind for _, kind in drawn],
        cap_bytes=cap,
        first_cap_bytes=first_cap,
    )
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(drawn)))


@given(parameters, st.integers(1, 100))
def test_a_bucket_holds_one_kind_and_exceeds_the_cap_only_with_a_single_parameter(
    drawn: list[tuple[int, str]], cap: int
) -> None:
    sizes = [size for size, _ in drawn]
    for bucket in fuse(sizes, [kind for _, kind in drawn], cap_bytes=cap):
        assert len({drawn[index][1] for index in bucket}) == 1
        filled = sum(sizes[index] for index in bucket)
        assert filled <= cap or sum(sizes[index] > 0 for index in bucket) == 1


@given(parameters)
def test_without_a_cap_there_is_one_bucket_a_kind(drawn: list[tuple[int, str]]) -> None:
    buckets = fuse([size for size, _ in drawn], [kind for _, kind in drawn], cap_bytes=None)
    assert len(buckets) == len({kind for _, kind in drawn})


def test_later_parameters_come_first() -> None:
    assert fuse([4, 4, 4, 4], ["f32"] * 4, cap_bytes=8) == [[3, 2], [1, 0]]


def test_the_first_bucket_may_be_smaller() -> None:
    assert fuse([4, 4, 4, 4], ["f32"] * 4, cap_bytes=12, first_cap_bytes=4) == [[3], [2, 1, 0]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
def test_owners_of_any_long_range_have_equal_shares(world_size: int) -> None:
    start, length = 12345, 100 * OWNER_BLOCK * world_size
    owned = np.bincount(
        owner_of(np.arange(start, start + length), world_size), minlength=world_size
    )
    assert owned.max() - owned.min() <= OWNER_BLOCK


# Rotating groups: everyone is in just one, nobody is alone, and a few versions connect all.


WORLD_SIZES = [*range(1, 34), 63, 64, 65, 100, 255, 256, 1000, 1023, 1024]
GROUP_SIZES = [2, 3, 4, 5, 8, 10, 16, 32, 100]

worlds = st.lists(st.integers(0, 5000), min_size=1, max_size=40, unique=True)


@given(st.integers(0, 10**9), worlds, st.integers(2, 50))
def test_groups_are_disjoint_cover_everyone_and_keep_the_members_order(
    version: int, members: list[int], size: int
) -> None:
    found = groups(version, members, size)
    assert sorted(rank for group in found for rank in group) == sorted(members)
    assert all(list(group) == [rank for rank in members if rank in group] for group in found)


def test_groups_are_balanced_no_larger_than_asked_and_nobody_is_alone() -> None:
    for world_size, size in product(WORLD_SIZES, GROUP_SIZES):
        for version in range(3):
            sizes = {len(group) for group in groups(version, range(world_size), size)}
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= min(2, world_size)
            assert max(sizes) <= (3 if size == 2 and world_size % 2 else size)


def versions_until_all_are_connected(first: int, world_size: int, size: int) -> int:
    """How many versions it takes until everyone's model has something of everyone's."""
    reached = np.eye(world_size, dtype=bool)
    version = first
    while not reached.all():
        for group in groups(version, range(world_size), size):
            reached[list(group)] = reached[list(group)].any(axis=0)
        version += 1
    return version - first


def test_everyone_is_connected_within_the_logarithm_and_one() -> None:
    for world_size, size in product(WORLD_SIZES, GROUP_SIZES):
        bound = math.ceil(math.log(world_size) / math.log(size) - 1e-9)
        is_butterfly = world_size & (world_size - 1) == 0 and size & (size - 1) == 0
        for first in (0, 1, 7):
            assert versions_until_all_are_connected(first, world_size, size) <= bound + (
                not is_butterfly
            )


def test_the_papers_example() -> None:
    assert groups(0, range(8), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(1, range(8), 4) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize(("bits", "of_group"), [(2, 2), (3, 1), (3, 2), (4, 3), (5, 3), (6, 2)])
def test_partners_in_a_butterfly_differ_in_the_versions_bits(bits: int, of_group: int) -> None:
    for version in range(7):
        free = {1 << (version * of_group + phase) % bits for phase in range(of_group)}
        for group in groups(version, range(1 << bits), 1 << of_group):
            assert np.bitwise_or.reduce([rank ^ group[0] for rank in group]) == sum(free)


def test_exact_averaging_in_full_turns_reaches_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=64)
    averaged = values.copy()
    for version in range(5, 8):
        for group in groups(version, range(64), 4):
            averaged[list(group)] = averaged[list(group)].mean()
    np.testing.assert_allclose(averaged, values.mean())


def test_a_group_as_large_as_the_world_is_everyone() -> None:
    assert groups(3, [5, 7, 9], 3) == groups(3, [5, 7, 9], 100) == [(5, 7, 9)]
    assert groups(3, [5], 2) == [(5,)]


@given(st.integers(1, 500), st.integers(2, 600))
def test_the_number_of_groups_is_the_one_announced(world_size: int, size: int) -> None:
    assert len(groups(1, range(world_size), size)) == num_groups(world_size, size)


@given(st.integers(0, 1000), worlds, st.integers(2, 9), st.integers(1, 12), st.floats(0.01, 1.0))
def test_members_of_a_group_agree_on_it(
    version: int, members: list[int], size: int, period: int, quorum: float
) -> None:
    found_groups = {
        rank: group_of_version(
            version, rank, members, group_size=size, period=period, quorum=quorum
        )
        for rank in members
    }
    for rank, found in found_groups.items():
        assert rank in found.ranks
        assert all(found_groups[other] == found for other in found.ranks)
    if (version + 1) % period == 0:
        everyone = VersionGroup(
            ranks=tuple(members), min_arrivals=found_groups[members[0]].min_arrivals
        )
        assert set(found_groups.values()) == {everyone}
        assert everyone.min_arrivals >= 1
        assert (
            quorum * len(members) - 1
            < everyone.min_arrivals
            <= max(1, quorum * len(members) + 1e-6)
        )
    else:
        assert all(found.min_arrivals == 1 for found in found_groups.values())


# Mixing matrices are stochastic the way each method needs, partners agree, and everyone is
# reached.


GRAPH_SIZES = [*range(1, 18), 64]

graphs = st.integers(2, 40).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size), st.integers(1, world_size - 1), st.integers(0, 10_000)
    )
)


def ring_matrix(world_size: int) -> NDArray[np.float64]:
    matrix = np.zeros((world_size, world_size))
    for rank in range(world_size):
        for peer, weight in ring_weights(rank, world_size).items():
            matrix[rank, peer] = weight
    return matrix


def push_matrix(world_size: int, round_number: int, out_degree: int) -> NDArray[np.float64]:
    """What fraction of rank j's mass rank i holds after the round, at [i, j]."""
    matrix = np.zeros((world_size, world_size))
    for rank in range(world_size):
        targets = exponential_peers(
            rank, world_size, round_number=round_number, out_degree=out_degree
        ).targets
        for receiver in (rank, *targets):
            matrix[receiver, rank] = 1 / (1 + len(targets))
    return matrix


def test_the_ring_is_symmetric_and_doubly_stochastic() -> None:
    for world_size in GRAPH_SIZES:
        matrix = ring_matrix(world_size)
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        assert (np.diag(matrix) > 0).all()


def test_the_ring_reaches_agreement() -> None:
    for world_size in GRAPH_SIZES:
        magnitudes = np.sort(np.abs(np.linalg.eigvalsh(ring_matrix(world_size))))
        assert world_size == 1 or magnitudes[-2] < 1 - 1e-6


@given(graphs)
def test_whoever_is_sent_to_expects_it(graph: tuple[int, int, int]) -> None:
    world_size, out_degree, round_number = graph
    peers = [
        exponential_peers(r, world_size, round_number=round_number, out_degree=out_degree)
        for r in range(world_size)
    ]
    for rank, (targets, sources) in enumerate(peers):
        assert rank not in targets
        assert len(set(targets)) == len(set(sources)) == out_degree
        assert all(rank in peers[target].sources for target in targets)
        assert all(rank in peers[source].targets for source in sources)


@given(graphs)
def test_pushing_is_column_stochastic(graph: tuple[int, int, int]) -> None:
    world_size, out_degree, round_number = graph
    np.testing.assert_allclose(push_matrix(world_size, round_number, out_degree).sum(axis=0), 1)


def test_every_rank_hears_of_every_other_one_within_a_cycle() -> None:
    for world_size, out_degree in product((2, 3, 5, 6, 7, 8, 17), (1, 2, 4)):
        if out_degree >= world_size:
            continue
        reached = np.eye(world_size)
        for round_number in range(len(exponential_hops(world_size, out_degree))):
            reached = push_matrix(world_size, round_number, out_degree) @ reached
        assert (reached > 0).all()


def test_one_peer_and_a_power_of_two_average_exactly_in_log_rounds() -> None:
    for world_size in (2, 4, 8, 16, 32):
        shares = np.eye(world_size)
        for round_number in range(num_rounds(world_size)):
            shares = push_matrix(world_size, round_number, 1) @ shares
        np.testing.assert_allclose(shares, 1 / world_size)


def test_alone_there_is_nobody_to_send_to() -> None:
    assert exponential_peers(0, 1, round_number=3, out_degree=1) == ((), ())


# Binomial trees pair up, reach everyone and take as many rounds as they must.


TREE_SIZES = [*range(1, 18), 64, 1024]


def test_every_send_has_its_receive() -> None:
    for world_size in TREE_SIZES:
        rounds = {rank: reduce_rounds(rank, world_size) for rank in range(world_size)}
        sends = {(rank, peer) for rank in rounds for peer, is_send in rounds[rank] if is_send}
        receives = {
            (peer, rank) for rank in rounds for peer, is_send in rounds[rank] if not is_send
        }
        assert sends == receives


def test_everyone_but_the_root_sends_once_and_last() -> None:
    for world_size in TREE_SIZES:
        for rank in range(world_size):
            directions = [is_send for _, is_send in reduce_rounds(rank, world_size)]
            assert directions.count(True) == (rank != 0)
            assert True not in directions[:-1]


def test_the_root_has_one_round_for_each_doubling() -> None:
    for world_size in TREE_SIZES:
        assert len(reduce_rounds(0, world_size)) == num_rounds(world_size)


def test_broadcast_is_the_reduction_backwards() -> None:
    for world_size in TREE_SIZES:
        for rank in range(world_size):
            down = [(peer, not is_send) for peer, is_send in broadcast_rounds(rank, world_size)]
            assert down[::-1] == reduce_rounds(rank, world_size)
