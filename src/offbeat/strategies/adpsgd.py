"""AD-PSGD: each rank averages its weights with one random peer at a time, asynchronously (arXiv
1710.06952).

    on each rank i, after each step:  choose a random j; atomically x_i, x_j = (x_i + x_j)/2 each
    meanwhile:                        g = gradient; x_i = x_i - gamma g, for the current x_i

The protocol is `averaging.background.pair_average`. Rank j answers from its progress thread while
it computes. The trainer of rank i does not wait: it takes the averages that have come at the end of
its step, and an answer that has not come by then is merged later.

Cost per step: each rank sends on average 2 n elements for n weights: n to ask a partner, and n to
answer a peer.

Differences from the paper: there, ranks are either active or passive, because two ranks that ask
each other would wait for ever. Here averages are merged as differences, so that any rank may ask
and answer at once, and the mean over ranks stays exact. Floating-point buffers take plain means,
integer ones stay local. A rank whose gradient is not finite skips its own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background import pair_average
from offbeat.averaging.background.averager import BackgroundWeightAverage, delta_merge
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.rounding import Rounding
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.weights.model_weights import ModelWeights, Staging


@dataclass(frozen=True, kw_only=True)
class ADPSGD(AveragingStrategy):
    """Weights averaged with one random worker after every step, asynchronously.

    Args:
        values: how weights travel: "float32" (float64 where the model has such), or "bfloat16" for
            half the bytes, whose rounding stays in the worker's own model.
    """

    survives_death = True
    trains_islands = True

    values: Literal["float32", "bfloat16"] = "float32"

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        staging = Staging(weights.tensors(), in_miniature=True)
        statistics = tuple(staging.spans(weights.positions_of_statistics()))
        model = SharedModel(
            delta_merge(staging, weights), one_at_a_time=False, changed=context.driver.condition()
        )
        return [
            BackgroundWeightAverage(
                context,
                weights,
                model,
                staging=staging,
                serve=pair_average.serve,
                group_of=self.group_of,
                rounding=Rounding(statistics) if self.values == "bfloat16" else None,
                overlap=True,
            )
        ]

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        """The group of the member at `position` in `version`."""
        if num_members == 1:
            return VersionGroup(ranks=(position,))
        # One draw of a generator of its own for each version, so that the choice depends on
        # nothing else.
        draw = int(np.random.default_rng([position, version]).integers(num_members - 1))
        return VersionGroup(ranks=(position, draw + (draw >= position)))
