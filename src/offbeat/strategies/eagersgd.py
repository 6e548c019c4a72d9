"""eager-SGD: gradients, averaged over whoever has come; who is late contributes its gradient to a
later one (arXiv 1908.04207).

    on each rank, in each step:
    G_send += gradient
    G = (1/P) partial_allreduce(G_send)                  who is late contributes what it has, which
    may be nothing, G_send = 0 if it was taken in                        and finds G when it comes
    the user's optimizer steps with G

- solo: the first to come begins the average. majority: it begins when half of the ranks have come.

Every rank applies every average, so models stay alike but for the order; in every `period`-th
version they are averaged.

Cost per step: at most 2 n (P-1)/P elements sent by each rank, nothing by one that owes nothing.

Differences from the paper: "majority" counts who has come, where the paper waits for one rank drawn
at random, which is half of the ranks in expectation only; models are averaged by steps rather than
epochs, and among a quorum; a rank that several averages have passed applies their sum in one step;
a rank whose gradient is not finite contributes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from offbeat.averaging.background import group_average
from offbeat.averaging.background.gradient_ledger import GradientReplica
from offbeat.averaging.background.merge_rules import DeltaIterate
from offbeat.averaging.background.partial_gradients import PartialExchange
from offbeat.parts.part import Part
from offbeat.parts.workspace import Workspace
from offbeat.planning.groups import Meeting
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.beside import answer
from offbeat.strategies.options import require_at_least, require_dense_optimizer, require_one_of
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class EagerSGD(AveragingStrategy):
    """Gradients averaged without waiting for stragglers.

    Args:
        mode: "solo": the first worker to come begins; "majority": half of them have to come.
        period: models are averaged in every so many versions, >= 2.
    """

    name: ClassVar[str] = "eagersgd"
    survives_death: ClassVar[bool] = True

    mode: Literal["solo", "majority"] = "majority"
    period: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("mode", self.mode, ("solo", "majority"))
        require_at_least("period", self.period, 2)

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_dense_optimizer(optimizer)

    def build(self, workspace: Workspace) -> Sequence[Part]:
        *exchanges, guard = super().build(workspace)
        return [guard, *exchanges]  # what is not finite must go before it is given away

    def parts(self, workspace: Workspace, weights: ModelWeights) -> list[Part]:
        num_parameters = len(workspace.parameters)
        beside = answer(
            workspace,
            weights,
            lambda staging: GradientReplica(
                staging.num_elements,
                num_parameters,
                make_iterate=DeltaIterate,
                averages_models=self._averages_models,
            ),
            service=group_average.serve,
            meeting=self._meeting,
            num_flags=num_parameters,
        )
        return [
            PartialExchange(
                beside, parameters=workspace.parameters, averages_models=self._averages_models
            )
        ]

    def _averages_models(self, version: int) -> bool:
        return (version + 1) % self.period == 0

    def _meeting(self, version: int, position: int, num_members: int) -> Meeting:
        half = -(-num_members // 2)
        several = self.mode == "majority" or self._averages_models(version)
        return Meeting(group=tuple(range(num_members)), min_fresh=half if several else 1)
