"""D-KFAC: every rank averages all factors and inverts all of them.

    forward and backward pass, gradients all-reduced, as in S-SGD
    all-reduce all A in one message and all G in another
    every rank: for each layer l:  invert A_l and G_l
                                   dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1
    the optimizer steps

The baseline of SPD-KFAC (arXiv 2107.06533, section III): Pauloski et al., arXiv 2007.00784, without
distributing inversions.

Cost per step, for P ranks and factors of d_i rows: 2(P-1)/P sum of d_i (d_i + 1) / 2 elements sent
by each rank, behind the backward pass, and the inversion of everything on every rank.

Differences from the paper: those of strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.kfac.plans.factor_plan import FactorPlan, PlanInputs, two_messages
from offbeat.kfac.plans.placement import by_every_rank
from offbeat.strategies.kfac import KFACStrategy


@dataclass(frozen=True, kw_only=True)
class DKFAC(KFACStrategy):
    """K-FAC, all factors inverted by every rank. It differs from the other K-FAC strategies in its
    plan only.
    """

    name: ClassVar[str] = "dkfac"

    def plan(self, inputs: PlanInputs) -> FactorPlan:
        return FactorPlan(
            groups=two_messages(inputs.kinds),
            streamed=False,
            owners=by_every_rank(len(inputs.dims)),
        )
