"""PowerSGD (arXiv 1905.13727): gradients as products of two thin matrices.

    for each bucket of gradients, as backward completes it: P of its matrices, summed over all ranks
    Q of all matrices, summed over all ranks; gradient = P Q^T / P, and what that loses is owed
    optimizer step

`gradients.low_rank` has the steps, and the differences from the paper.

Cost per step: two all-reduces of r (n + m) elements for each parameter of shape (n, m), the first
one overlapped with backward; three products of n m r multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.low_rank import LowRankReduction, RightFactors
from offbeat.strategies.gradient import GradientStrategy, Reductions


@dataclass(frozen=True, kw_only=True)
class PowerSGD(GradientStrategy):
    """Gradients as products of two thin matrices.

    Args:
        rank: columns of these matrices, >= 1: 1, 2 or 4 are usual.
    """

    trains_islands = True
    needs_optimizer: ClassVar[bool] = False

    rank: OneOrMore = 2

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        driver, new_stream = context.driver, context.new_stream
        rights = RightFactors(driver, new_stream())
        return Reductions(
            [
                (
                    bucket,
                    LowRankReduction(
                        bucket, rank=self.rank, driver=driver, stream=new_stream(), rights=rights
                    ),
                )
                for bucket in self.buckets(context)
            ]
        )
