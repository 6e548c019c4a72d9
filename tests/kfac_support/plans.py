"""The strategies of K-FAC with other plans: the paper's ablations and rules, and what is easier to
compare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import offbeat
from _models.kfac_iteration import fuse_by_rule
from offbeat.kfac.placement import Owner, place_by_rule
from offbeat.kfac.plans import (
    Groups,
    KFACPlanner,
    PlanInputs,
    every_rank,
    in_turn,
    split_kinds,
    two_messages,
)


def one_message_each(inputs: PlanInputs) -> Groups:
    return tuple((slot,) for group in two_messages(inputs) for slot in group)


def fused_by_rule(inputs: PlanInputs) -> Groups:
    if inputs.ready_s is None or inputs.costs is None:
        return two_messages(inputs)
    ready_s = inputs.ready_s
    order = sorted(range(len(ready_s)), key=lambda slot: (ready_s[slot], slot))
    groups = fuse_by_rule(
        [ready_s[slot] for slot in order],
        [inputs.sizes_bytes[slot] for slot in order],
        inputs.costs.all_reduce,
    )
    return split_kinds([[order[place] for place in group] for group in groups], inputs.kinds)


def placed_by_rule(inputs: PlanInputs) -> tuple[Owner, ...]:
    if inputs.costs is None:
        return every_rank(inputs)
    return place_by_rule(inputs.dims, inputs.world_size, inputs.costs.inverse)


class Unfused(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(offbeat.SPDKFAC.planner, groups=one_message_each)


class FullyFused(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(offbeat.SPDKFAC.planner, groups=two_messages)


class ByThePapersRules(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(
        offbeat.SPDKFAC.planner, groups=fused_by_rule, owners=placed_by_rule
    )


class InTurnWithoutPipelining(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(
        offbeat.SPDKFAC.planner, groups=two_messages, owners=in_turn, streamed=False
    )


class WithoutLoadBalancing(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(offbeat.SPDKFAC.planner, owners=every_rank)


class FactorsOfEveryone(offbeat.DPKFAC):
    """Factors are all-reduced, so that the update is that of the other strategies."""

    planner: ClassVar[KFACPlanner] = replace(offbeat.DPKFAC.planner, groups=two_messages)
