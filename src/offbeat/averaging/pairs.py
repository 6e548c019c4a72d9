"""Weights, averaged by random pairs of ranks, each with an outer optimizer of its own (NoLoCo,
arXiv 2506.10911).

    at each average, the ranks are paired at random, the same pairs on every rank:
        mean    = (x_i + x_j) / 2                       a rank that is left over: x_i
        anchor  = the outer optimizer's step from this rank's anchor, with anchor - mean
        x       = anchor

No rank waits for more than one other, and nothing is reduced over all. With SGD as the outer
optimizer the mean over ranks of their anchors is the one anchor that DiLoCo would make of the same
local models; how far ranks stay apart depends on how often they meet.

Cost per average: n elements sent by each rank, in one message for each 8 MiB, whatever P.

Differences from the paper: its outer momentum has a further term that pulls pairs together, whose
formula was not at hand; here the mean of weights alone does that. Statistics of buffers go to the
pair's mean, and counters stay local.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from offbeat.arithmetic.topologies import random_partner
from offbeat.averaging.gossip import blocks_of, vectors_of
from offbeat.averaging.periodic import Everyone, ExchangeWithPeers, TakeMean
from offbeat.callbacks.callback import CallbackState
from offbeat.codec.option_value import OptionValue
from offbeat.collectives.gossip import Block, neighbour_mean
from offbeat.errors import ConfigError
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import ModelWeights, Pack


class Pairs(OptionValue):
    """Averages of random pairs of ranks.

    Args:
        seed: of the choice of partners, >= 0.
    """

    def __init__(self, *, seed: int = 0) -> None:
        if seed < 0:
            raise ConfigError(f"the seed of Pairs must be at least 0, got {seed}")
        self.seed = seed


class PairMean(ExchangeWithPeers[list[Block]]):
    """The weights of a random pair become what each rank's `rule` makes of their mean.

    Args:
        weights: what is averaged.
        peers: all ranks.
        pairs: who meets whom.
        rule: what this rank does with the mean.
    """

    state_key = "pair_average"

    def __init__(
        self, weights: ModelWeights, peers: Everyone, *, pairs: Pairs, rule: TakeMean | None = None
    ) -> None:
        super().__init__(peers, rule=rule)
        self._weights, self._seed = weights, pairs.seed
        self._pack = Pack(weights.tensors())

    @override
    def _leave(self, number: int) -> Collective[list[Block]]:
        rank, world_size = self._peers.driver.rank, self._peers.driver.world_size
        partner = random_partner(rank, world_size, seed=self._seed, round_number=number)
        members = {rank, partner}
        blocks = blocks_of(self._pack.vectors(self._weights.tensors()), rank)
        # Of two summands the order does not matter, so that both ranks have the same bits.
        return neighbour_mean(rank, blocks, dict.fromkeys(members, 1 / len(members)))

    @override
    def _take(self, came: list[Block]) -> None:
        self._pack.write_(vectors_of(came, self._pack), self._weights.tensors())
        self.rule.merge_(None)

    @override
    def state(self) -> CallbackState:
        return {"local": self.rule.state()}

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.rule.load(state["local"])
