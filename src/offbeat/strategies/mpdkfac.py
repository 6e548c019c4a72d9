"""MPD-KFAC: every rank averages all factors and inverts its share of them.

    forward and backward pass, gradients all-reduced, as in S-SGD
    all-reduce all A in one message and all G in another
    rank i mod P inverts factor i and broadcasts the inverse
    every rank: for each layer l:  dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1
    the optimizer steps

The other baseline of SPD-KFAC (arXiv 2107.06533, section III): Osawa et al., arXiv 1811.12019, and
2007.00784.

Cost per step, for factors of d_i rows: 2(P-1)/P sum of d_i (d_i + 1) / 2 elements sent by each
rank, behind the backward pass, and as many as the inverses have, once each, by broadcast.

Differences from the paper: an owner's inverses of one size travel in one message, and while it goes
on inverting; those of strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.kfac.plans.factor_plan import FactorPlan, PlanInputs, two_messages
from offbeat.kfac.plans.placement import round_robin
from offbeat.strategies.kfac import KFACStrategy


@dataclass(frozen=True, kw_only=True)
class MPDKFAC(KFACStrategy):
    """K-FAC, each factor inverted by one rank. It differs from the other K-FAC strategies in its
    plan only.
    """

    name: ClassVar[str] = "mpdkfac"

    def plan(self, inputs: PlanInputs) -> FactorPlan:
        owners = round_robin(len(inputs.dims), inputs.world_size)
        return FactorPlan(groups=two_messages(inputs.kinds), streamed=False, owners=owners)
