"""SPD-KFAC: factors travel while computation goes on, and are inverted where that is cheapest.

    forward:   A of each layer, all-reduced in groups as they become ready
    backward:  G of each layer, likewise, beside the gradients
    factors that are cheaper to invert than to receive are inverted by every rank; the others,
    largest first, by the rank with the least to do, and broadcast while it goes on gradient = G^-1
    gradient A^-1; optimizer step

Shi, Zhang and Li, "Accelerating Distributed K-FAC with Smart Parallelism of Computing and
Communication Tasks", arXiv 2107.06533, sections IV (pipelining and fusion) and V (placement).

Cost per step: as of MPD-KFAC, less what is hidden behind the forward and backward passes, less
broadcasts of small inverses.

Differences from the paper: the groups are the fewest with the earliest end and the placement that
with about the shortest predicted phase, of measured costs (`fusion="rule"` and `placement="rule"`:
the paper's rules; kfac/planning/overlap.py and placement.py say where they fall short). An
inversion takes what was measured and not alpha exp(beta d). Inverses of one owner share messages
where that is shorter. Groups are planned in the fourth step with factors; until then, all A are one
and all G another. And those of strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.kfac.planning.factor_plan import (
    FactorPlan,
    Groups,
    Setting,
    fused_groups,
    split_kinds,
    two_messages,
)
from offbeat.kfac.planning.overlap import fuse_by_rule, fuse_in_order
from offbeat.kfac.planning.placement import Load, Owner, balanced, cheaper_by_all, everywhere
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.options import require_one_of


@dataclass(frozen=True, kw_only=True)
class SPDKFAC(KFACStrategy):
    """K-FAC whose communication hides behind its computation. It differs from the other K-FAC
    strategies in its plan only.

    Args:
        fusion: which factors share a message: "planned" for the earliest end, "rule" for the
            paper's rule, "none" for one message each, "all" for all A in one and all G in another.
        placement: which rank inverts what: "planned" for the shortest phase, "rule" for the paper's
            rule.
        load: what placement balances: fitted "time", or "rows", "squares" or "cubes" of the
            factors' sizes.
    """

    name: ClassVar[str] = "spdkfac"
    measures: ClassVar[bool] = True

    fusion: Literal["planned", "rule", "none", "all"] = "planned"
    placement: Literal["planned", "rule"] = "planned"
    load: Literal["time", "rows", "squares", "cubes"] = "time"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("fusion", self.fusion, ("planned", "rule", "none", "all"))
        require_one_of("placement", self.placement, ("planned", "rule"))
        require_one_of("load", self.load, ("time", "rows", "squares", "cubes"))

    def plan(self, setting: Setting) -> FactorPlan:
        return FactorPlan(groups=self._groups(setting), streamed=True, owners=self._owners(setting))

    def _groups(self, setting: Setting) -> Groups:
        if self.fusion == "all":
            return two_messages(setting.kinds)
        if self.fusion == "none":
            return split_kinds(
                [[slot] for group in two_messages(setting.kinds) for slot in group], setting.kinds
            )
        return fused_groups(setting, fuse_in_order if self.fusion == "planned" else fuse_by_rule)

    def _owners(self, setting: Setting) -> tuple[Owner, ...]:
        if setting.costs is None:
            return everywhere(len(setting.dims))
        load: Load = self.load
        place = balanced if self.placement == "planned" else cheaper_by_all
        return place(setting.dims, setting.world_size, setting.costs.inverse, load=load)
