"""WAGMA-SGD: weights, averaged in small rotating groups that wait for nobody (arXiv 2005.00124,
algorithm 2).

    on each rank, in step t:
    W' = W + U(G)                                        the user's optimizer, on this rank's own
    gradient if (t + 1) mod period:
        W_sum = wait_avoiding_group_allreduce(W')        who is late contributes its last model, and
        computes on W = W_sum / S                                    if W' was in, else (W_sum + W')
        / (S + 1)
    else:
        W = mean of everyone's W'

The protocol is `averaging.background.group_average`, the groups `planning.groups`; a progress
thread (`averaging.background.progress`) runs it beside training. A worker that dies, hangs or is
cut off does not stop the others, and may come back (`membership.generations`).

Cost per step: at most 2 n (S-1)/S elements sent by each rank, 2 n (P-1)/P in every `period`-th;
(S-1) n where models are small. The trainer waits in every `period`-th step for a quorum to arrive,
and for the network unless `overlap`.

Differences from the paper, further to those of the two modules:
- `merge="delta"`, the default, is W_sum/S + (W' - what W' contributed): what a late rank did
  meanwhile is kept, and so is the mean over ranks. The paper's rule, which pulls the mean towards
  the late, is `merge="paper"`.
- `overlap`, the default with it: an average travels while the next step is computed and is merged
  at its end. For that of everyone a rank waits until enough have arrived, and not for the network.
- the periodic average goes on when `quorum` of the ranks have arrived; the others contribute what
  they have. The paper waits for all, as `quorum=1.0` does.
- a version is the group's time rather than a rank's step: a rank that is slower for good takes part
  in all of them.
- buffers are averaged with the weights, integer ones by their maximum; a rank whose gradient is not
  finite skips its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from offbeat.averaging.background import group_average
from offbeat.averaging.background.averager import GroupAverage
from offbeat.averaging.background.merge_rules import DeltaIterate, PaperIterate
from offbeat.averaging.background.published_model import Replica
from offbeat.errors import ConfigError
from offbeat.parts.part import Part
from offbeat.parts.workspace import Workspace
from offbeat.planning.groups import Meeting, default_group_size, meeting
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.beside import answer
from offbeat.strategies.options import require_at_least, require_one_of
from offbeat.weights.model_weights import ModelWeights
from offbeat.weights.momenta import Momenta, momentum_name


@dataclass(frozen=True, kw_only=True)
class WAGMA(AveragingStrategy):
    """Weights averaged in rotating groups, without waiting for stragglers.

    Args:
        group_size: S, from 2 to the number of workers; None: about its square root.
        period: everyone averages together in every so many versions, >= 1.
        merge: "delta" keeps the mean over ranks and what late ranks did; "paper" is the paper's
            rule.
        quorum: the fraction of workers that has to arrive at the periodic average, in (0, 1]; 1
            waits for all.
        overlap: go on computing while an average travels, be it a group's or everyone's; None: with
            "delta". "paper" cannot.
        momenta: "averaged": when everyone meets, the optimizers' momenta are averaged with the
            weights; "local": they stay each worker's own.
        groups: "rotating", or for ablations "fixed" (the same groups for good) and "off" (the
            periodic average only).
    """

    name: ClassVar[str] = "wagma"
    survives_death: ClassVar[bool] = True

    group_size: int | None = None
    period: int = 10
    merge: Literal["delta", "paper"] = "delta"
    quorum: float = 0.75
    overlap: bool | None = None
    momenta: Literal["local", "averaged"] = "local"
    groups: Literal["rotating", "fixed", "off"] = "rotating"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size is not None:
            require_at_least("group_size", self.group_size, 2)
        require_at_least("period", self.period, 1)
        require_one_of("merge", self.merge, ("delta", "paper"))
        require_one_of("momenta", self.momenta, ("local", "averaged"))
        require_one_of("groups", self.groups, ("rotating", "fixed", "off"))
        if not 0 < self.quorum <= 1:
            raise ConfigError(
                "quorum must be above 0 and at most 1, the fraction of workers that has to arrive,"
                f" got {self.quorum}"
            )
        if self.overlap and self.merge == "paper":
            raise ConfigError(
                'merge="paper" takes an average in the place of the model, so overlap must be'
                " False, got True"
            )

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        if self.momenta == "averaged":
            momentum_name(optimizer)

    def check_world(self, world_size: int) -> None:
        if self.group_size is not None and self.group_size > max(2, world_size):
            raise ConfigError(
                f"group_size is {self.group_size}, allowed is 2 to {max(2, world_size)}, the number"
                " of workers; leave it out for about the square root of that"
            )

    def parts(self, workspace: Workspace, weights: ModelWeights) -> list[Part]:
        momenta = None
        if self.momenta == "averaged" and workspace.optimizer is not None:
            momenta = Momenta(workspace.optimizer, workspace.parameters)
        iterate = DeltaIterate if self.merge == "delta" else PaperIterate
        beside = answer(
            workspace,
            weights,
            lambda staging: Replica(weight=1.0, make_iterate=iterate),
            service=group_average.serve,
            meeting=self._meeting,
            momenta=momenta,
            averages_momenta=lambda version: momenta is not None and self._meets_everyone(version),
        )
        return [
            GroupAverage(
                beside,
                interval=self.period if self.groups == "off" else 1,
                overlap=self.merge == "delta" if self.overlap is None else self.overlap,
            )
        ]

    def _meets_everyone(self, version: int) -> bool:
        return self.groups == "off" or (version + 1) % self.period == 0

    def _meeting(self, version: int, position: int, num_members: int) -> Meeting:
        return meeting(
            version if self.groups != "fixed" or self._meets_everyone(version) else 0,
            position,
            range(num_members),
            group_size=(
                default_group_size(num_members) if self.group_size is None else self.group_size
            ),
            period=1 if self.groups == "off" else self.period,
            quorum=self.quorum,
        )
