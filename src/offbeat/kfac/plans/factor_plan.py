"""What the K-FAC strategies plan: which factors share a message, in which order messages are
launched, which rank inverts which factor, and which ranks use the inverses.

A *slot* is a factor: slot 2 l is A of block l, slot 2 l + 1 its G. Plans are pure functions of a
`PlanInputs`, which is the same on all ranks, so all ranks make the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from offbeat.arithmetic.costs import LinkCost
from offbeat.gradients.launch_order import LaunchKey
from offbeat.kfac.plans.placement import InverseCosts, Owner, least_loaded

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


def two_messages(kinds: Sequence[Hashable]) -> Groups:
    """All A, first block first, then all G, last block first; as many messages more as there are
    kinds.

    >>> two_messages(["f32"] * 4)
    ((0, 2), (3, 1))
    """
    halves = range(0, len(kinds), 2), range(len(kinds) - 1, 0, -2)
    return split_kinds([list(half) for half in halves], kinds)


def split_kinds(groups: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> Groups:
    """`groups`, cut where the kind changes.

    >>> split_kinds([[0, 1, 2]], ["f32", "f32", "f64"])
    ((0, 1), (2,))
    """
    return tuple(
        tuple(part) for group in groups for _, part in groupby(group, key=lambda slot: kinds[slot])
    )


def fused_groups(
    inputs: PlanInputs, fuse: Callable[[Sequence[float], Sequence[int], LinkCost], list[list[int]]]
) -> Groups:
    """Messages as `fuse` (`kfac.planning.overlap`) makes them of what was measured; `two_messages`
    as long as nothing was.
    """
    if inputs.ready_s is None or inputs.costs is None:
        return two_messages(inputs.kinds)
    ready_s = inputs.ready_s
    order = sorted(range(len(ready_s)), key=lambda slot: (ready_s[slot], slot))
    groups = fuse(
        [ready_s[slot] for slot in order],
        [inputs.sizes_bytes[slot] for slot in order],
        inputs.costs.all_reduce,
    )
    return split_kinds([[order[place] for place in group] for group in groups], inputs.kinds)


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
