"""What the K-FAC strategies plan: which factors share a message, in which order messages are
launched, which rank inverts which factor, and which ranks use the inverses.

A *slot* is a factor: slot 2 l is A of block l, slot 2 l + 1 its G. Plans are pure functions of a
`PlanInputs`, which is the same on all ranks, so all ranks make the same plan.

The order in which factors are inverted:

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

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from offbeat.arithmetic.costs import LinkCost
from offbeat.gradients.exchange import LaunchKey
from offbeat.kfac.overlap import fuse_for_earliest_end
from offbeat.kfac.placement import (
    InverseCosts,
    Owner,
    by_every_rank,
    fused_messages,
    largest_first,
    least_loaded,
    place_for_shortest_phase,
    round_robin,
)

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Slots by message, in the order in which messages are sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorCosts:
    """What was measured, the slowest rank's.

    Attributes:
        all_reduce: of factors.
        inverse: of their inverses.
    """

    all_reduce: LinkCost
    inverse: InverseCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """What a plan depends on.

    Attributes:
        world_size: number of ranks, >= 1.
        same_devices: whether all ranks compute on devices of one kind, which round alike.
        dims: rows of a matrix that takes as long to invert as slot s; 1 for a diagonal.
        sizes_bytes: of each slot on the wire.
        kinds: slots of different kinds cannot share a message.
        costs: as measured; None where the strategy does not ask for them.
        ready_s: when each slot is ready within a step, as measured; None as long as nobody knows.
    """

    world_size: int
    same_devices: bool
    dims: Sequence[int]
    sizes_bytes: Sequence[int]
    kinds: Sequence[Hashable]
    costs: FactorCosts | None = None
    ready_s: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPlan:
    """What all ranks do.

    Attributes:
        groups: slots that are all-reduced together; none: each owner keeps to the factors of its
            own batch.
        streamed: groups start as soon as they are complete and all before them have started; False:
            behind the backward pass.
        owners: who inverts each slot; None: every rank.
        by_owner: only owners have inverses, and they send preconditioned gradients; False: every
            rank has all inverses and preconditions all gradients itself.
    """

    groups: Groups
    streamed: bool
    owners: tuple[Owner, ...]
    by_owner: bool = False

    def is_kept_by(self, rank: int, slot: int) -> bool:
        """Whether `rank` averages the factor of `slot` over time. Where preconditioned gradients
        travel, that is its owner's business alone.
        """
        return not self.by_owner or self.owners[slot] == rank


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACPlanner:
    """What tells the K-FAC strategies apart. Its plans are the same on all ranks.

    Attributes:
        groups: says which factors share a message.
        owners: says which rank inverts each factor.
        streamed: as in `FactorPlan`.
        by_owner: the same.
        measures: whether groups and owners depend on measured costs and times.
    """

    groups: Callable[[PlanInputs], Groups]
    owners: Callable[[PlanInputs], tuple[Owner, ...]]
    streamed: bool = False
    by_owner: bool = False
    measures: bool = False

    def plan(self, inputs: PlanInputs) -> FactorPlan:
        # What several ranks computed for themselves would drift apart where they round differently,
        # so one rank computes it for all.
        by_owner = self.by_owner or not inputs.same_devices
        return FactorPlan(
            groups=self.groups(inputs),
            streamed=self.streamed,
            owners=(self.owners if by_owner == self.by_owner else block_owners)(inputs),
            by_owner=by_owner,
        )


# Which factors share a message


def no_messages(inputs: PlanInputs) -> Groups:
    """Each owner keeps to the factors of its own batch."""
    return ()


def two_messages(inputs: PlanInputs) -> Groups:
    """All A, first block first, then all G, last block first; as many messages more as there are
    kinds.

    >>> inputs = PlanInputs(
    ...     world_size=2, same_devices=True, dims=[3] * 4, sizes_bytes=[24] * 4, kinds=["f32"] * 4
    ... )
    >>> two_messages(inputs)
    ((0, 2), (3, 1))
    """
    num_slots = len(inputs.kinds)
    halves = range(0, num_slots, 2), range(num_slots - 1, 0, -2)
    return split_kinds([list(half) for half in halves], inputs.kinds)


def planned_messages(inputs: PlanInputs) -> Groups:
    """Those with which the last sum is there as early as possible (`kfac.overlap`), of what was
    measured; `two_messages` as long as nothing was.
    """
    if inputs.ready_s is None or inputs.costs is None:
        return two_messages(inputs)
    ready_s = inputs.ready_s
    order = sorted(range(len(ready_s)), key=lambda slot: (ready_s[slot], slot))
    groups = fuse_for_earliest_end(
        [ready_s[slot] for slot in order],
        [inputs.sizes_bytes[slot] for slot in order],
        inputs.costs.all_reduce,
    )
    return split_kinds([[order[place] for place in group] for group in groups], inputs.kinds)


def split_kinds(groups: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> Groups:
    """`groups`, cut where the kind changes.

    >>> split_kinds([[0, 1, 2]], ["f32", "f32", "f64"])
    ((0, 1), (2,))
    """
    return tuple(
        tuple(part) for group in groups for _, part in groupby(group, key=lambda slot: kinds[slot])
    )


# Which rank inverts which factor


def every_rank(inputs: PlanInputs) -> tuple[Owner, ...]:
    """All factors by every rank."""
    return by_every_rank(len(inputs.dims))


def in_turn(inputs: PlanInputs) -> tuple[Owner, ...]:
    """Factor i by rank i mod P."""
    return round_robin(len(inputs.dims), inputs.world_size)


def shortest_phase(inputs: PlanInputs) -> tuple[Owner, ...]:
    """Those with about the shortest predicted phase (`kfac.placement`); every rank in a world of
    one, where nothing is measured and there is nobody to send to.
    """
    if inputs.costs is None:
        return every_rank(inputs)
    return place_for_shortest_phase(inputs.dims, inputs.world_size, inputs.costs.inverse)


def block_owners(inputs: PlanInputs) -> tuple[Owner, ...]:
    """Both factors of a block to one rank, the largest blocks first, each to the rank with the
    least d^3 so far.

    >>> inputs = PlanInputs(
    ...     world_size=2,
    ...     same_devices=True,
    ...     dims=[4, 2, 3, 3, 1, 1],
    ...     sizes_bytes=[1] * 6,
    ...     kinds=["f32"] * 6,
    ... )
    >>> block_owners(inputs)
    (0, 0, 1, 1, 1, 1)
    """
    dims = inputs.dims
    loads = [float(a**3 + g**3) for a, g in zip(dims[::2], dims[1::2], strict=True)]
    return tuple(owner for owner in least_loaded(loads, inputs.world_size) for _ in range(2))


def launch_sequence(
    plan: FactorPlan, first_parameters: Sequence[int], bucket_firsts: Sequence[int]
) -> list[LaunchKey]:
    """The one order in which a step's messages are launched on every rank.

    Dense collectives meet in the order in which they are launched, whatever hooks fire first on a
    rank. There are two orders:

    - Behind the backward pass: all buckets, then all groups of factors.
    - Streamed: groups of A alone come first, and each other group comes before the first bucket
      that the backward pass can only complete after it. The last bucket waits for the end of the
      pass; of the groups that remain by then, all but the last one come before it. What has
      arrived is then inverted while that last group is under way, and yet not before the gradients
      have said whether the step is good.

    Args:
        plan: what is sent.
        first_parameters: for each slot, the position of its block's first parameter in the model.
        bucket_firsts: for each bucket, in the order in which they are launched, the position of its
            first parameter.

    >>> plan = FactorPlan(groups=((0, 2), (3,), (1,)), streamed=True, owners=(None,) * 4)
    >>> launch_sequence(plan, [0, 0, 2, 2], [2, 0])
    [('factors', 0), ('factors', 1), ('gradients', 0), ('gradients', 1), ('factors', 2)]
    """
    factors: list[LaunchKey] = [("factors", number) for number in range(len(plan.groups))]
    buckets: list[LaunchKey] = [("gradients", number) for number in range(len(bucket_firsts))]
    if not plan.streamed:
        return buckets + factors
    order: list[LaunchKey] = []
    waiting = list(zip(factors[:-1], plan.groups[:-1], strict=True))
    for number, bucket in enumerate(buckets[:-1]):
        while waiting and _first_of(waiting[0][1], first_parameters) >= bucket_firsts[number]:
            order.append(waiting.pop(0)[0])
        order.append(bucket)
    return order + [factor for factor, _ in waiting] + buckets[-1:] + factors[-1:]


def _first_of(group: Sequence[int], first_parameters: Sequence[int]) -> float:
    """How far the backward pass must have come for `group` to be complete: the position of a
    parameter.
    """
    outputs = [first_parameters[slot] for slot in group if slot % 2]
    return min(outputs, default=math.inf)


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
    kinds = list(zip(needed, plan.owners, strict=True))
    for kind in sorted(set(kinds), key=lambda each: each[0]):
        num_messages, owner = kind
        slots = [slot for slot in ordered if kinds[slot] == kind]
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
            messages = fused_messages(dims, inputs.world_size, inputs.costs.inverse)
            divided += [[some[place] for place in message] for message in messages]
        else:
            by_size = groupby(some, key=lambda slot: inputs.dims[slot])
            divided += [list(same_size) for _, same_size in by_size]
    return divided
