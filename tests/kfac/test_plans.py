"""Plans: what shares a message, who inverts, and in which order."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from _models.kfac_iteration import fuse_by_rule, last_end_s
from kfac_support.plans import ByThePapersRules, FactorsOfEveryone, Unfused
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.overlap import fuse_for_earliest_end
from offbeat.kfac.placement import InverseCosts
from offbeat.kfac.plans import (
    FactorCosts,
    FactorPlan,
    PlanInputs,
    block_owners,
    inversion_order,
    launch_sequence,
)
from offbeat.strategies.kfac import KFACStrategy
from offbeat_lab.plan.profile import PolynomialInversion

# Plans of the K-FAC strategies: every factor travels once, in one order, and A before G.


STRATEGIES: dict[str, KFACStrategy] = {
    "dkfac": offbeat.DKFAC(),
    "mpdkfac": offbeat.MPDKFAC(),
    "spdkfac": offbeat.SPDKFAC(),
    "spdkfac by the paper's rules": ByThePapersRules(),
    "spdkfac, unfused": Unfused(),
    "dpkfac": FactorsOfEveryone(),
}
COSTS = FactorCosts(
    all_reduce=LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8),
    inverse=InverseCosts(
        inversion=PolynomialInversion(constant_s=1e-4, square_s=0.0, cube_s=1e-10),
        broadcast=Channel(link=LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8), gap_s=5e-4),
    ),
)


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInputs:
    num_blocks = draw(st.integers(1, 12))
    num_slots = 2 * num_blocks
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=num_slots, max_size=num_slots)))
    inputs, outputs = ready[:num_blocks], ready[num_blocks:][::-1]
    dims = draw(st.lists(st.integers(1, 2000), min_size=num_slots, max_size=num_slots))
    return PlanInputs(
        world_size=draw(st.sampled_from([1, 2, 3, 4, 64, 1024])),
        same_devices=True,
        dims=dims,
        sizes_bytes=[2 * dim * (dim + 1) for dim in dims],
        kinds=draw(
            st.lists(st.sampled_from(["f32", "f64"]), min_size=num_slots, max_size=num_slots)
        ),
        costs=COSTS,
        ready_s=draw(
            st.sampled_from(
                [None, [time for pair in zip(inputs, outputs, strict=True) for time in pair]]
            )
        ),
    )


@pytest.mark.parametrize("name", STRATEGIES)
@given(inputs=plan_inputs())
def test_every_factor_travels_once_and_is_inverted_by_somebody(
    name: str, inputs: PlanInputs
) -> None:
    plan = STRATEGIES[name].planner.plan(inputs)
    sent = [slot for group in plan.groups for slot in group]
    assert sorted(sent) == list(range(len(inputs.dims)))
    assert all(sent.index(slot) < sent.index(slot + 1) for slot in range(0, len(sent), 2)), (
        "G of a block leaves before its A"
    )
    assert all(len({inputs.kinds[slot] for slot in group}) == 1 for group in plan.groups)
    assert all(owner is None or 0 <= owner < inputs.world_size for owner in plan.owners)
    assert plan == STRATEGIES[name].planner.plan(replace(inputs))


@pytest.mark.parametrize("name", STRATEGIES)
@given(inputs=plan_inputs(), num_buckets=st.integers(1, 5))
def test_the_launch_sequence_holds_everything_once_and_buckets_in_order(
    name: str, inputs: PlanInputs, num_buckets: int
) -> None:
    plan = STRATEGIES[name].planner.plan(inputs)
    firsts = [2 * slot for slot in range(len(inputs.dims))]
    order = launch_sequence(plan, firsts, [10 * number for number in reversed(range(num_buckets))])
    assert [number for kind, number in order if kind == "factors"] == list(range(len(plan.groups)))
    assert [number for kind, number in order if kind == "gradients"] == list(range(num_buckets))
    assert order[-1][0] == "factors", (
        "gradients are there before the last factors, so that those before them are put to use"
    )
    assert (order[-2][0] == "gradients") == (plan.streamed or len(plan.groups) == 1)


@given(plan_inputs())
def test_both_factors_of_a_block_have_one_owner(inputs: PlanInputs) -> None:
    owners = block_owners(inputs)
    assert owners[::2] == owners[1::2]


def test_the_strategies_are_their_papers() -> None:
    inputs = PlanInputs(
        world_size=2, same_devices=True, dims=[3, 4, 5, 6], sizes_bytes=[1] * 4, kinds=["f32"] * 4
    )
    assert offbeat.DKFAC().planner.plan(inputs) == FactorPlan(
        groups=((0, 2), (3, 1)), streamed=False, owners=(None,) * 4
    )
    assert offbeat.MPDKFAC().planner.plan(inputs) == FactorPlan(
        groups=((0, 2), (3, 1)), streamed=False, owners=(0, 1, 0, 1)
    )
    assert offbeat.SPDKFAC().planner.plan(inputs).streamed
    assert offbeat.DPKFAC().planner.plan(inputs) == FactorPlan(
        groups=(), streamed=False, owners=(1, 1, 0, 0), by_owner=True
    )


# Every factor is inverted once, never before what it needs, and what can be inverted earlier goes
# first.


INVERSION = FactorCosts(
    all_reduce=LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8),
    inverse=InverseCosts(
        inversion=PolynomialInversion(constant_s=1e-4, square_s=0.0, cube_s=1e-10),
        broadcast=Channel(link=LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8), gap_s=5e-4),
        fused=True,
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[FactorPlan, PlanInputs]:
    num_slots = 2 * draw(st.integers(1, 10))
    world_size = draw(st.sampled_from([1, 2, 4]))
    cuts = sorted(draw(st.sets(st.integers(1, num_slots - 1), max_size=4)))
    sent = draw(st.permutations(range(num_slots)))
    groups = tuple(tuple(sent[a:b]) for a, b in zip([0, *cuts], [*cuts, num_slots], strict=True))
    owner = st.one_of(st.none(), st.integers(0, world_size - 1))
    plan = FactorPlan(
        groups=draw(st.sampled_from([groups, ()])),
        streamed=draw(st.booleans()),
        owners=tuple(draw(st.lists(owner, min_size=num_slots, max_size=num_slots))),
    )
    inputs = PlanInputs(
        world_size=world_size,
        same_devices=True,
        dims=draw(
            st.lists(st.sampled_from([1, 3, 30, 300, 301]), min_size=num_slots, max_size=num_slots)
        ),
        sizes_bytes=[1] * num_slots,
        kinds=draw(
            st.lists(st.sampled_from(["f32", "f64"]), min_size=num_slots, max_size=num_slots)
        ),
        costs=draw(st.sampled_from([None, INVERSION])),
    )
    return plan, inputs


@given(plans(), st.booleans())
def test_every_factor_is_inverted_once_by_whom_the_plan_says(
    made: tuple[FactorPlan, PlanInputs], pairs: bool
) -> None:
    plan, inputs = made
    order = inversion_order(plan, inputs, pairs=pairs)
    assert sorted(slot for batch in order for slot in batch.slots) == list(range(len(inputs.dims)))
    assert all(plan.owners[slot] == batch.owner for batch in order for slot in batch.slots)
    assert all(len({inputs.kinds[slot] for slot in batch.slots}) == 1 for batch in order)
    assert order == inversion_order(replace(plan), replace(inputs), pairs=pairs)


@given(plans(), st.booleans())
def test_nothing_is_inverted_before_what_it_needs_is_there(
    made: tuple[FactorPlan, PlanInputs], pairs: bool
) -> None:
    plan, inputs = made
    for batch in inversion_order(plan, inputs, pairs=pairs):
        needed = {slot ^ either for slot in batch.slots for either in ((0, 1) if pairs else (0,))}
        missing = [group for group in plan.groups[batch.num_messages :] if needed & set(group)]
        assert not missing
        assert batch.num_messages <= len(plan.groups)


@given(plans())
def test_what_can_be_inverted_earlier_goes_first_and_by_everyone_last(
    made: tuple[FactorPlan, PlanInputs],
) -> None:
    order = inversion_order(*made, pairs=True)
    parts = [list(part) for _, part in groupby(order, key=lambda batch: batch.owner is None)]
    assert len(parts) <= 2
    assert [batch.owner is None for batch in order] == sorted(
        batch.owner is None for batch in order
    )
    for part in parts:
        assert [batch.num_messages for batch in part] == sorted(
            batch.num_messages for batch in part
        )


def test_factors_of_the_last_message_do_not_hold_up_the_others() -> None:
    inputs = PlanInputs(
        world_size=2,
        same_devices=True,
        dims=[9, 8, 7, 7, 6, 6],
        sizes_bytes=[1] * 6,
        kinds=["f32"] * 6,
    )
    plan = FactorPlan(groups=((0, 2), (4, 5), (3, 1)), streamed=True, owners=(0, 1, 0, 1, 1, None))
    order = inversion_order(plan, inputs, pairs=False)
    assert [(batch.slots, batch.num_messages) for batch in order] == [
        ((4,), 2),
        ((0,), 2),
        ((2,), 2),
        ((1,), 3),
        ((3,), 3),
        ((5,), 2),
    ]


# Fusion of messages that become ready in turn: nothing ends earlier than the best, and what the
# published rule misses.


def cases(max_size: int) -> st.SearchStrategy[tuple[list[float], list[int], LinkCost]]:
    """(ready_s, sizes_bytes, link)."""
    messages = st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 100)), min_size=1, max_size=max_size
    )
    links = st.builds(LinkCost, alpha_s=st.floats(0, 3), beta_s_per_byte=st.floats(0, 0.1))
    return st.tuples(messages, links).map(
        lambda drawn: (
            list(accumulate(wait for wait, _ in drawn[0])),
            [size for _, size in drawn[0]],
            drawn[1],
        )
    )


def unfused(num_messages: int) -> list[list[int]]:
    return [[index] for index in range(num_messages)]


def every_fusion(num_messages: int) -> list[list[list[int]]]:
    fusions = []
    for num_cuts in range(num_messages):
        for cuts in combinations(range(1, num_messages), num_cuts):
            bounds = [0, *cuts, num_messages]
            fusions.append([list(range(a, b)) for a, b in pairwise(bounds)])
    return fusions


@given(cases(7))
def test_no_fusion_ends_earlier(case: tuple[list[float], list[int], LinkCost]) -> None:
    best = last_end_s(fuse_for_earliest_end(*case), *case)
    assert best == pytest.approx(
        min(last_end_s(fusion, *case) for fusion in every_fusion(len(case[0])))
    )


@given(cases(40))
def test_fused_is_never_slower_than_unfused_or_fully_fused_or_the_rule(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    num_messages = len(case[0])
    best = last_end_s(fuse_for_earliest_end(*case), *case) * (1 - 1e-12)
    assert best <= last_end_s(unfused(num_messages), *case)
    assert best <= last_end_s([list(range(num_messages))], *case)
    assert best <= last_end_s(fuse_by_rule(*case), *case)


@given(cases(40))
def test_the_rule_is_never_slower_than_unfused_or_fully_fused(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    num_messages = len(case[0])
    by_rule = last_end_s(fuse_by_rule(*case), *case) * (1 - 1e-12)
    assert by_rule <= last_end_s(unfused(num_messages), *case)
    assert by_rule <= last_end_s([list(range(num_messages))], *case)


@given(cases(40))
@pytest.mark.parametrize("fuse", [fuse_for_earliest_end, fuse_by_rule])
def test_every_message_is_sent_once_in_order(
    fuse: object, case: tuple[list[float], list[int], LinkCost]
) -> None:
    assert callable(fuse)
    assert [index for group in fuse(*case) for index in group] == list(range(len(case[0])))


@given(cases(40))
def test_the_rule_merges_just_those_that_are_ready_within_alpha(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    ready_s, sizes_bytes, link = case
    groups = fuse_by_rule(ready_s, sizes_bytes, link)
    for before, group in enumerate(groups):
        free_s = last_end_s(groups[:before], ready_s, sizes_bytes, link)
        for index in group[:-1]:
            assert ready_s[index + 1] < max(free_s, ready_s[index]) + link.alpha_s
        if group is not groups[-1]:
            assert ready_s[group[-1] + 1] >= max(free_s, ready_s[group[-1]]) + link.alpha_s


def test_the_published_rule_may_fuse_everything_into_the_last_message() -> None:
    """Each message waits a little for the next, and so the first one waits for the last; sending on
    the way costs less.
    """
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=0.1)
    ready_s, sizes_bytes = [0.9 * index for index in range(20)], [5] * 20
    assert len(fuse_by_rule(ready_s, sizes_bytes, link)) == 1
    as_published = (
        last_end_s(fuse_by_rule(ready_s, sizes_bytes, link), ready_s, sizes_bytes, link)
        - ready_s[-1]
    )
    best = (
        last_end_s(fuse_for_earliest_end(ready_s, sizes_bytes, link), ready_s, sizes_bytes, link)
        - ready_s[-1]
    )
    assert as_published > 4 * best


def test_free_start_up_needs_no_fusion_and_free_bytes_need_no_hurry() -> None:
    ready_s, sizes_bytes = [0.0, 1.0, 2.0], [10, 10, 10]
    free_start = LinkCost(alpha_s=0.0, beta_s_per_byte=0.01)
    assert last_end_s(
        fuse_for_earliest_end(ready_s, sizes_bytes, free_start), ready_s, sizes_bytes, free_start
    ) == pytest.approx(2.1)
    assert fuse_for_earliest_end(
        ready_s, sizes_bytes, LinkCost(alpha_s=10.0, beta_s_per_byte=0.0)
    ) == [[0, 1, 2]]


def test_nothing_to_send_is_no_group() -> None:
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=1.0)
    assert fuse_for_earliest_end([], [], link) == fuse_by_rule([], [], link) == []
    assert last_end_s([], [], [], link) == 0.0


@given(cases(7))
def test_no_fusion_that_ends_as_early_has_fewer_messages(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    fused = fuse_for_earliest_end(*case)
    end_s = last_end_s(fused, *case) * (1 + 1e-12)
    assert len(fused) == min(
        len(fusion) for fusion in every_fusion(len(case[0])) if last_end_s(fusion, *case) <= end_s
    )
