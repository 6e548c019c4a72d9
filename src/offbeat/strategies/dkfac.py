"""D-KFAC: every rank averages all factors and inverts all of them.

    forward, backward, gradients as in S-SGD
    all-reduce all A in one message, all G in another
    every rank inverts every factor
    gradient = G^-1 gradient A^-1; optimizer step

The baseline of SPD-KFAC (arXiv 2107.06533, section III): Pauloski et al., arXiv 2007.00784, without
distributing inversions.

Cost per step, for factors of d_i rows: 2(P-1)/P sum of d_i (d_i + 1) / 2 elements sent by each
rank, behind the backward pass, and the inversion of everything on every rank.

Differences from the paper: those of strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.kfac.planning.factor_plan import FactorPlan, Setting, two_messages
from offbeat.kfac.planning.placement import everywhere
from offbeat.strategies.kfac import KFACStrategy


@dataclass(frozen=True, kw_only=True)
class DKFAC(KFACStrategy):
    """K-FAC, all factors inverted by every rank. It differs from the other K-FAC strategies in its
    plan only.
    """

    name: ClassVar[str] = "dkfac"

    def plan(self, setting: Setting) -> FactorPlan:
        return FactorPlan(
            groups=two_messages(setting.kinds), streamed=False, owners=everywhere(len(setting.dims))
        )
