"""AD-PSGD: each rank averages its weights with one random other rank at a time, and nobody keeps
step (arXiv 1710.06952).

    on each rank i, after each step:  choose a random j; atomically x_i, x_j = (x_i + x_j)/2 each
    meanwhile:                        g = gradient; x_i = x_i - gamma g, whatever x_i has become by
        then

Rank j answers from its progress thread while it computes. The trainer waits for nobody: it finds
what has come in at the end of its step, and leaves a partner out that has not answered by then.

Cost per step: on average 2 n elements sent by each rank, one asked for and one answered.

Differences from the paper: there, ranks are either active or passive, because two that ask each
other would wait for ever; here averages are merged as differences, so ranks may ask and answer at
once, whatever the number of ranks, and the mean over ranks stays exact. Buffers are averaged too; a
rank whose gradient is not finite skips its own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offbeat.averaging.background import pair_average
from offbeat.averaging.background.averager import GroupAverage
from offbeat.averaging.background.merge_rules import DeltaIterate
from offbeat.averaging.background.published_model import Replica
from offbeat.parts.part import Part
from offbeat.parts.workspace import Workspace
from offbeat.planning.groups import Meeting
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.beside import answer
from offbeat.strategies.options import require_at_least
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class ADPSGD(AveragingStrategy):
    """Weights averaged with one random worker after every step, asynchronously.

    Args:
        seed: the seed of the choice of partners, >= 0.
    """

    name: ClassVar[str] = "adpsgd"
    survives_death: ClassVar[bool] = True

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seed", self.seed, 0)

    def parts(self, workspace: Workspace, weights: ModelWeights) -> list[Part]:
        beside = answer(
            workspace,
            weights,
            lambda staging: Replica(weight=1.0, make_iterate=DeltaIterate, by_turns=False),
            service=pair_average.serve,
            meeting=self._meeting,
        )
        return [GroupAverage(beside, interval=1, overlap=True)]

    def _meeting(self, version: int, position: int, num_members: int) -> Meeting:
        if num_members == 1:
            return Meeting(group=(position,))
        draw = int(np.random.default_rng([self.seed, position, version]).integers(num_members - 1))
        return Meeting(group=(position, draw + (draw >= position)))
