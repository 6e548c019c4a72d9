"""D-PSGD: in every step, each rank averages its weights with those of its two neighbours on a ring
(arXiv 1705.09056, algorithm 1).

    on each rank i, as backward begins: send x_i to both neighbours
    g = gradient at x_i
    x_i = sum over j of W_ij x_j - gamma g              W_ij = 1/3 for i and its neighbours (1/2 in
    a world of two)

The average is taken of the weights at which gradients are computed, as in the paper, so it travels
while they are computed. It is added after the optimizer's step, as its difference from x_i: gamma g
may be any optimizer's step from x_i.

With `codec` only encoded differences to what neighbours hold of x_i travel, as in CHOCO-SGD (arXiv
1902.00340); see `averaging.gossip.NeighbourChanges`.

Cost per step: 2 n elements and 2 messages (for each 8 MiB) sent by each rank, whatever P; lock-step
with the neighbours alone. The mean over ranks moves as under S-SGD; differences between ranks fade
more slowly the longer the ring. With a codec 2 of its messages, three vectors more in memory, and
one exact exchange at first.

Differences from the paper: the ring only, with equal weights; half precision is sent as float32;
floating-point buffers are averaged with the neighbours', integer ones stay local; a rank whose
gradient is not finite skips its own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from offbeat.arithmetic.topologies import ring_weights
from offbeat.averaging.gossip import NeighbourChanges, NeighbourMean, ring_round
from offbeat.averaging.periodic import Everyone, GrowingPeriod, PeriodicAverage, WeightExchange
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class DPSGD(AveragingStrategy):
    """Weights averaged with two neighbours in every step.

    Args:
        codec: how weights travel, as their differences to what the neighbours hold of them: the
            name of a codec, or a `WeightCodec`. What does not travel is part of the next
            difference. None: weights travel whole.
    """

    sends_differences = True

    codec: ChangesCodec = None

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        driver, codec = context.driver, self.weight_codec
        row = ring_weights(driver.rank, driver.world_size)
        peers, in_round = Everyone(driver, context.new_stream()), ring_round(driver.rank, row)
        whole = partial(NeighbourMean, peers=peers, row=row)
        exchange: WeightExchange = whole(weights)
        if codec is not None:
            exchange = NeighbourChanges(
                weights, peers, whole=whole, in_round=lambda _: in_round, codec=codec
            )
        return [PeriodicAverage(exchange, GrowingPeriod(1))]
