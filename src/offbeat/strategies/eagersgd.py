"""eager-SGD: gradients averaged over the ranks that have arrived; a late rank contributes its
gradient to a later average (arXiv 1908.04207).

    on each rank, in each step:
    G_send += gradient
    G = (1/P) partial_allreduce(G_send)   a late rank contributes what it has, which may be nothing,
                                          and finds G when it arrives
    G_send = 0                            if it was in the average; else it is still owed
    the user's optimizer steps with G

- solo: the average begins when the first rank arrives.
- majority: it begins when half of the ranks have arrived.

Every rank applies every average, so that models are equal except for the order of the updates; in
every `period`-th version the models are averaged.

The protocol is `averaging.background.group_average`, among all ranks; the account of what is owed
is `averaging.background.gradient_ledger`.

Cost per step: at most 2 n (P-1)/P elements sent by each rank, and nothing by a rank that owes
nothing.

Differences from the paper: "majority" counts the ranks that have arrived, where the paper waits for
one rank drawn at random, which is half of the ranks in expectation only. Models are averaged by
steps instead of epochs, and among a quorum. A rank that missed several averages applies their sum
in one step. A rank whose gradient is not finite contributes nothing. What is owed or not applied
when a rank has taken its last step is not in the final model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.averager import delta_merge
from offbeat.averaging.background.gradient_ledger import GradientLedger
from offbeat.averaging.background.partial_all_reduce import PartialAllReduce
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import TwoOrMore
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.options import require_dense_optimizer
from offbeat.weights.model_weights import ModelWeights, Staging


@dataclass(frozen=True, kw_only=True)
class EagerSGD(AveragingStrategy):
    """Gradients averaged without waiting for stragglers.

    Args:
        mode: "solo": an average begins when the first worker arrives; "majority": when half of the
            workers have arrived.
        period: the models are averaged in every `period`-th version, among half of the
            workers or more; >= 2.
    """

    survives_death = True
    trains_islands = True
    changes_gradients = True

    mode: Literal["solo", "majority"] = "majority"
    period: TwoOrMore = 100

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_dense_optimizer(optimizer)

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        staging = Staging(weights.tensors(), in_miniature=True)
        ledger = GradientLedger(
            staging.num_elements,
            len(context.parameters),
            make_rule=delta_merge(staging, weights),
            averages_models=self._averages_models,
            changed=context.driver.condition(),
        )
        return [
            PartialAllReduce(
                context,
                weights,
                ledger,
                staging=staging,
                group_of=self._group_of,
                averages_models=self._averages_models,
            )
        ]

    def _averages_models(self, version: int) -> bool:
        return (version + 1) % self.period == 0

    def _group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        half = -(-num_members // 2)
        several = self.mode == "majority" or self._averages_models(version)
        return VersionGroup(ranks=tuple(range(num_members)), min_arrivals=half if several else 1)
