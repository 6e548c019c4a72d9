"""Plans of the K-FAC strategies: every factor travels once, in one order, and A before G."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from kfac_support.plans import ByThePapersRules, FactorsOfEveryone, Unfused
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.placement import InverseCosts
from offbeat.kfac.plans import FactorCosts, FactorPlan, PlanInputs, block_owners, launch_sequence
from offbeat.strategies.kfac import KFACStrategy
from offbeat_lab.plan.profile import PolynomialInversion

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
