"""CROSSBOW's synchronous model averaging: every model is drawn towards a central average model z
(PVLDB 12(11), 2019; arXiv 1901.02244).

    every tau steps, on each rank j:  c_j = alpha (x_j - z)
        x_j = x_j - eta gradient(x_j) - c_j
        z   = z + sum over j of c_j

With `codec`, c_j is what has travelled of alpha (x_j - z), so the sum of z and of all x_j is what
it would be without one; see `averaging.central_model`.

Cost per average: one all-reduce of the weights, beside the optimizer's step; in lock-step. With a
codec 2(P-1)/P n coded values, or P - 1 times a message of k entries, sent by each rank.

Differences from the paper: the codec; the central model has no momentum, and is not copied into
the models when the learning rate falls, since nothing here sees that; `Session.averaged_model` is
the mean of the models, not z; statistics are drawn to their plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from offbeat.averaging.central_model import CentralModel
from offbeat.averaging.periodic import (
    Everyone,
    GrowingPeriod,
    PeriodicAverage,
    coded_changes,
)
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore, UpToOne
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Crossbow(AveragingStrategy):
    """Synchronous model averaging: every model is drawn towards a central one.

    Args:
        period: tau, steps between averages, >= 1.
        alpha: how far a model is drawn to the central average model, in (0, 1]; None: one over the
            number of ranks, at most 1/2.
        codec: how differences from the central model travel: the name of a codec, or a
            `WeightCodec`. What does not travel is part of the next difference. None: weights travel
            whole.
    """

    sends_differences = True

    period: OneOrMore = 1
    alpha: UpToOne | None = None
    codec: ChangesCodec = None

    @property
    @override
    def keeps_anchor(self) -> bool:
        return True

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        driver = context.driver
        alpha = 1 / max(driver.world_size, 2) if self.alpha is None else self.alpha
        peers, codec = Everyone(driver, context.new_stream()), self.weight_codec
        changes = coded_changes(context.parameters, codec, peers)
        central = CentralModel(weights, peers, alpha=alpha, changes=changes)
        return [PeriodicAverage(central, GrowingPeriod(self.period))]
