"""Every factor is inverted once, never before what it needs, and what can be inverted earlier goes
first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.placement import InverseCosts
from offbeat.kfac.plans import FactorCosts, FactorPlan, PlanInputs, inversion_order
from offbeat_lab.plan.profile import PolynomialInversion

COSTS = FactorCosts(
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
        costs=draw(st.sampled_from([None, COSTS])),
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
