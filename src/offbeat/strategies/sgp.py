"""SGP: stochastic gradient push over a directed exponential graph (arXiv 1811.10792, algorithm 1).

    on each rank i, with z_i = x_i / w_i in the model:
    g = gradient at z_i
    x_i = x_i - gamma g
    send p x_i and p w_i to `out_degree` peers, and keep as much      p = 1 / (1 + out_degree)
    x_i, w_i = sums of what was kept and what was received
    z_i = x_i / w_i

In round t the peers are 2**t, 2**(t+1), ... ranks further on, in turn. The sums of x and of w over
all ranks are what they would be without sending, to rounding. On this graph every rank hears from
as many as it sends to, so w stays 1; it departs from 1 only where the graph is no longer regular.

With `codec` only encoded differences to what each target holds travel: a rank parts with its share
of what a target holds of it, and takes its share of what it holds of its source, so that the mean
over ranks stays what it is whatever a codec loses (`averaging.gossip.NeighbourChanges`).

Cost per step: `out_degree` n elements and `out_degree` messages (for each 8 MiB) sent by each rank,
after the step and overlapped with nothing. With a codec messages of it, two vectors more in memory
for each distance, and one exact message at first for each.

Differences from the paper: any world size, out-degrees beyond the number of powers of two; gamma g
may be any optimizer's step from z; half precision is sent as float32 and x is kept in it;
floating-point buffers take part, integer ones stay local; a rank whose gradient is not finite skips
its own step. There is no overlapped variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from offbeat.arithmetic.topologies import exponential_peers
from offbeat.averaging.gossip import PushedChanges, PushSum, push_round
from offbeat.averaging.periodic import Everyone, GrowingPeriod, PeriodicAverage, WeightExchange
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.errors import ConfigError
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class SGP(AveragingStrategy):
    """Weights pushed to a few other ranks in every step.

    Args:
        out_degree: how many ranks each one sends to in a step, >= 1 and below the world size.
        codec: how weights travel, as their differences to what a target holds of them: the name of
            a codec, or a `WeightCodec`. What does not travel is part of the next difference. None:
            weights travel whole.
    """

    sends_differences = True

    out_degree: OneOrMore = 1
    codec: ChangesCodec = None

    def check_world(self, world_size: int) -> None:
        if world_size > 1 and self.out_degree >= world_size:
            raise ConfigError(
                f"out_degree must be below the number of ranks, got {self.out_degree} with"
                f" {world_size} ranks; each rank can send to {world_size - 1} others"
            )

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        driver = context.driver
        in_round = partial(
            exponential_peers, driver.rank, driver.world_size, out_degree=self.out_degree
        )
        peers, codec = Everyone(driver, context.new_stream()), self.weight_codec
        whole = partial(PushSum, peers=peers, in_round=in_round)
        exchange: WeightExchange = whole(weights)
        if codec is not None:
            exchange = PushedChanges(
                weights,
                peers,
                whole=whole,
                in_round=lambda number: push_round(driver.rank, in_round(number)),
                codec=codec,
            )
        return [PeriodicAverage(exchange, GrowingPeriod(1))]
