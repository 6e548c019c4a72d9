"""SPD-KFAC: factors travel while computation goes on, and are inverted where that is cheapest.

    forward pass:    for each layer in order:   A_l <- mean of a a^T
                     all-reduce each group of A as soon as it is complete
    backward pass:   for each layer in reverse: G_l <- mean of g g^T, and dL/dW_l
                     all-reduce each group of G, and each bucket of gradients, likewise
    inversion:       for each factor, largest first:
                         if inverting it takes less time than receiving it:
                             every rank inverts it
                         else:
                             the rank with the least to do inverts it and broadcasts the inverse,
                             while it goes on with the next
    update:          dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1, and the optimizer steps with it

Shi, Zhang and Li, "Accelerating Distributed K-FAC with Smart Parallelism of Computing and
Communication Tasks", arXiv 2107.06533, sections IV (pipelining and fusion) and V (placement).

Cost per step: as of MPD-KFAC, less what is hidden behind the forward and backward passes, less
broadcasts of small inverses.

Differences from the paper: the groups are the fewest with the earliest end, and the placement is
one with about the shortest predicted phase, both of measured costs. `fusion="rule"` and
`placement="rule"` are the paper's rules; kfac/planning/overlap.py and placement.py say where they
fall short. `pipelining=False` and `placement="everyone"` leave one of the two out, as the paper's
ablations do. An inversion takes what was measured and not alpha exp(beta d). Inverses of one owner
share messages where that is shorter. Groups are planned in the fourth step with factors; until
then, all A are one group and all G another. And those of strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.kfac.plans.factor_plan import (
    FactorPlan,
    Groups,
    PlanInputs,
    fused_groups,
    split_kinds,
    two_messages,
)
from offbeat.kfac.plans.overlap import fuse_by_rule, fuse_for_earliest_end
from offbeat.kfac.plans.placement import (
    Owner,
    by_every_rank,
    place_by_rule,
    place_for_shortest_phase,
    round_robin,
)
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.options import refuse_idle, require_one_of


@dataclass(frozen=True, kw_only=True)
class SPDKFAC(KFACStrategy):
    """K-FAC whose communication hides behind its computation. It differs from the other K-FAC
    strategies in its plan only.

    Args:
        fusion: which factors share a message: "planned" for the earliest end, "rule" for the
            paper's rule, "none" for one message each, "all" for all A in one and all G in another.
        pipelining: whether factors travel while the passes compute; False: behind the backward
            pass, all A in one message and all G in another, whatever `fusion` says.
        placement: which rank inverts what: "planned" for the shortest predicted phase, "rule" for
            the paper's rule, "in_turn" for rank i mod P and factor i, "everyone" for every rank and
            all factors.
        load: what placement balances: measured "time", or "rows", "squares" or "cubes" of the
            factors' sizes.
    """

    name: ClassVar[str] = "spdkfac"
    measures: ClassVar[bool] = True

    fusion: Literal["planned", "rule", "none", "all"] = "planned"
    pipelining: bool = True
    placement: Literal["planned", "rule", "in_turn", "everyone"] = "planned"
    load: Literal["time", "rows", "squares", "cubes"] = "time"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("fusion", self.fusion, ("planned", "rule", "none", "all"))
        require_one_of("placement", self.placement, ("planned", "rule", "in_turn", "everyone"))
        require_one_of("load", self.load, ("time", "rows", "squares", "cubes"))
        if self.placement in ("in_turn", "everyone"):
            refuse_idle(self, "load", because=f"placement={self.placement!r} balances nothing")

    def plan(self, inputs: PlanInputs) -> FactorPlan:
        return FactorPlan(
            groups=self._groups(inputs), streamed=self.pipelining, owners=self._owners(inputs)
        )

    def _groups(self, inputs: PlanInputs) -> Groups:
        """Section IV: which factors share a message."""
        all_fused = two_messages(inputs.kinds)
        if self.fusion == "all" or not self.pipelining:
            return all_fused
        if self.fusion == "none":
            return split_kinds([[slot] for group in all_fused for slot in group], inputs.kinds)
        fuse = fuse_by_rule if self.fusion == "rule" else fuse_for_earliest_end
        return fused_groups(inputs, fuse)

    def _owners(self, inputs: PlanInputs) -> tuple[Owner, ...]:
        """Section V: which rank inverts which factor."""
        # In a world of one, where nothing was measured, there is nobody to send to.
        if inputs.costs is None or self.placement == "everyone":
            return by_every_rank(len(inputs.dims))
        if self.placement == "in_turn":
            return round_robin(len(inputs.dims), inputs.world_size)
        place = place_by_rule if self.placement == "rule" else place_for_shortest_phase
        return place(inputs.dims, inputs.world_size, inputs.costs.inverse, load=self.load)
