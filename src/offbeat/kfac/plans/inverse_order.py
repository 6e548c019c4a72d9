"""In which order factors are inverted, behind which of their messages, and which inverses travel
together.

1. A factor can be inverted when the message that sums it over ranks is there; with damping divided
   between the two factors of a block, when both messages are.
2. What an owner can invert behind the same message it inverts largest first. Inverses of one size
   share a message, or, where costs are known, those with which the last one arrives as early as
   possible (`placement.fused_messages`).
3. Messages of inverses are begun in one order on every rank: what can be inverted earlier first,
   then what is expected to be done earlier.
4. What every rank inverts is sent to nobody, so it fills the time in which a rank waits, and comes
   last where none does. It is one batch for each message it waits for: on a GPU the bits of an
   inverse depend on what it is batched with.

Nothing is inverted before the exchange of gradients is over. Messages that were begun during the
backward pass are taken to be there by then, all at once: one more step of the order would mean more
and smaller messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from offbeat.kfac.plans.factor_plan import FactorPlan, PlanInputs
from offbeat.kfac.plans.placement import Owner, fused_messages, largest_first


@dataclass(frozen=True, kw_only=True, slots=True)
class InverseBatch:
    """Factors that are inverted together, and whose inverses share a message if they are sent.

    Attributes:
        slots: which, largest first.
        owner: who inverts and sends them; None: every rank inverts them.
        num_messages: how many messages of factors, the first ones, must be there.
    """

    slots: tuple[int, ...]
    owner: Owner
    num_messages: int


def inversion_order(
    plan: FactorPlan, inputs: PlanInputs, *, pairs: bool
) -> tuple[InverseBatch, ...]:
    """What owners invert, in the order in which it is sent; then what every rank inverts. Every
    slot is in one batch.

    Args:
        plan: which factors travel together, and who inverts them.
        inputs: sizes and costs.
        pairs: whether inverting either factor of a block needs both.

    >>> inputs = PlanInputs(
    ...     world_size=2,
    ...     same_devices=True,
    ...     dims=[3, 3, 2, 2],
    ...     sizes_bytes=[1] * 4,
    ...     kinds=["f32"] * 4,
    ... )
    >>> plan = FactorPlan(groups=((0, 2, 3), (1,)), streamed=True, owners=(0, 0, 1, None))
    >>> batches = inversion_order(plan, inputs, pairs=True)
    >>> [(batch.slots, batch.owner, batch.num_messages) for batch in batches]
    [((2,), 1, 1), ((0, 1), 0, 2), ((3,), None, 1)]
    """
    needed = messages_needed(plan, len(inputs.dims), pairs=pairs)
    cost = inputs.costs.inverse.inversion if inputs.costs else None
    loads = [cost.time_s(dim) if cost else float(dim**3) for dim in inputs.dims]
    ordered = largest_first(loads)
    done: dict[Owner, float] = {}
    batches: list[tuple[tuple[bool, int, float], InverseBatch]] = []
    for num_messages, owner in sorted(
        {*zip(needed, plan.owners, strict=True)}, key=lambda some: some[0]
    ):
        slots = [
            slot for slot in ordered if (needed[slot], plan.owners[slot]) == (num_messages, owner)
        ]
        for together in _divided(slots, inputs, is_owned=owner is not None):
            done[owner] = done.get(owner, 0.0) + sum(loads[slot] for slot in together)
            batch = InverseBatch(slots=tuple(together), owner=owner, num_messages=num_messages)
            batches.append(((owner is None, num_messages, done[owner]), batch))
    return tuple(
        batch for _, batch in sorted(batches, key=lambda entry: (*entry[0], entry[1].slots))
    )


def messages_needed(plan: FactorPlan, num_slots: int, *, pairs: bool) -> list[int]:
    """For each slot, how many of the plan's messages must be there before it is inverted; 0 where
    none is sent.

    >>> plan = FactorPlan(groups=((0, 2), (3, 1)), streamed=False, owners=(None,) * 4)
    >>> messages_needed(plan, 4, pairs=False), messages_needed(plan, 4, pairs=True)
    ([1, 2, 1, 2], [2, 2, 2, 2])
    """
    first = len(plan.groups) - 1 if plan.streamed else 0
    needed = [0] * num_slots
    for number, group in enumerate(plan.groups, start=1):
        for slot in group:
            needed[slot] = max(number, first)
    if not pairs:
        return needed
    return [max(pair) for pair in zip(needed[::2], needed[1::2], strict=True) for _ in pair]


def _divided(slots: Sequence[int], inputs: PlanInputs, *, is_owned: bool) -> list[list[int]]:
    """`slots`, all of one owner or of none and in the order in which they are inverted,
    by batch.
    """
    divided: list[list[int]] = []
    for kind in dict.fromkeys(inputs.kinds[slot] for slot in slots):
        some = [slot for slot in slots if inputs.kinds[slot] == kind]
        if not is_owned:
            divided.append(some)
        elif inputs.costs is not None:
            dims = [inputs.dims[slot] for slot in some]
            divided += [
                [some[place] for place in message]
                for message in fused_messages(dims, inputs.world_size, inputs.costs.inverse)
            ]
        else:
            divided += [
                list(same_size)
                for _, same_size in groupby(some, key=lambda slot: inputs.dims[slot])
            ]
    return divided
