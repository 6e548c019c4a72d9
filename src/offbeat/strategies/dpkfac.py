"""DP-KFAC: each layer has an owner, which alone looks at its factors.

    forward and backward pass, gradients all-reduced, as in S-SGD
    the owner of layer l: averages A_l and G_l of its own batch over steps, and inverts them
                          dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1, which it broadcasts
    the optimizer steps

Zhang, Shi and Li, "Scalable K-FAC Training for Deep Neural Networks with Distributed
Preconditioning", arXiv 2206.15143.

Cost per step: the gradients once more, by broadcast, in every step; no factors and no inverses.
Each rank keeps only what it owns. With `factors="everyone"`, factors are all-reduced as in D-KFAC,
and the update is that of the other K-FAC strategies.

Differences from the paper: layers are dealt out by d^3, largest first, and not in turn; those of
strategies/kfac.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.kfac.plans.factor_plan import FactorPlan, PlanInputs, block_owners, two_messages
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.options import require_one_of


@dataclass(frozen=True, kw_only=True)
class DPKFAC(KFACStrategy):
    """K-FAC, only preconditioned gradients travel. It differs from the other K-FAC strategies in
    its plan only.

    Args:
        factors: whose examples factors are taken over: the "owner"'s, as published, or
            "everyone"'s, which all-reduces them.
    """

    name: ClassVar[str] = "dpkfac"

    factors: Literal["owner", "everyone"] = "owner"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("factors", self.factors, ("owner", "everyone"))

    def plan(self, inputs: PlanInputs) -> FactorPlan:
        groups = () if self.factors == "owner" else two_messages(inputs.kinds)
        return FactorPlan(groups=groups, streamed=False, owners=block_owners(inputs), by_owner=True)
