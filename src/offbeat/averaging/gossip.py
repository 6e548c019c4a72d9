"""Weights, averaged with a few ranks in every step: neighbours on a graph, or targets and sources
of push-sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from offbeat.arithmetic.topologies import GossipPeers
from offbeat.averaging.periodic import Drift, Everyone, WeightExchange
from offbeat.callbacks.callback import CallbackState
from offbeat.collectives.gossip import Block, neighbour_mean, push_sum
from offbeat.errors import CheckpointError
from offbeat.transport.driver import Pending
from offbeat.weights.model_weights import ModelWeights, Pack, require_finite
from offbeat.weights.statistics import merge_statistics


class NeighbourMean(WeightExchange):
    """Adds to the weights how far their neighbours' mean lay from them when the step began.
    Statistics take the mean itself.

    Weights leave as soon as backward begins, and their neighbours' are waited for when the
    optimizer has stepped, so they travel while gradients are computed.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
        row: of the mixing matrix: the weight of each rank to average with, this one included.
    """

    state_key = "neighbour_average"
    leaves_at = "backward"

    def __init__(self, weights: ModelWeights, peers: Everyone, *, row: Mapping[int, float]) -> None:
        self._weights, self._peers, self._row = weights, peers, row
        self._pack = Pack(weights.tensors())
        self._sent: list[torch.Tensor] = []
        self._pending: Pending[list[Block]] | None = None

    @override
    def launch(self, number: int) -> None:
        begin_s = time.perf_counter()
        self._sent = self._pack.vectors(self._weights.tensors())
        rank = self._peers.driver.rank
        self._pending = self._peers.launch(
            neighbour_mean(rank, blocks_of(self._sent, rank), self._row)
        )
        self.encode_s += time.perf_counter() - begin_s

    @override
    def merge(self, *, measures_drift: bool) -> Drift:
        assert self._pending is not None, "nothing was launched"
        blocks = self._pending.wait()
        begin_s = time.perf_counter()
        means = [
            vector_of(block, sent.device) for block, sent in zip(blocks, self._sent, strict=True)
        ]
        changes = [mean - sent for mean, sent in zip(means, self._sent, strict=True)]
        tensors = self._weights.tensors()
        before, mean_views, change_views = map(self._pack.views, (self._sent, means, changes))
        for position in self._weights.positions_of_statistics():
            change_views[position].zero_()  # a statistic is not moved by a difference
            now = tensors[position].to(before[position].dtype)
            tensors[position].copy_(merge_statistics(now, mean_views[position], before[position]))
        self._pack.add_(changes, tensors)
        self._sent = []
        self.encode_s += time.perf_counter() - begin_s
        return Drift()

    @override
    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class PushSum(WeightExchange):
    """A round of push-sum over weights x and their weight w; the model holds z = x / w.

    The optimizer moves z, and x moves by as much. What x has beyond z is kept apart; it is nothing
    as long as w is 1 and parameters are not of half precision. A statistic has nothing beyond: its
    x is w z.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
        in_round: whom this rank sends to and hears from, by the round's number.
    """

    state_key = "push_sum"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        in_round: Callable[[int], GossipPeers],
    ) -> None:
        self._weights, self._peers, self._in_round = weights, peers, in_round
        self._pack = Pack(weights.tensors())
        self._beyond: list[torch.Tensor] | None = None
        self._pending: Pending[tuple[list[Block], float]] | None = None

    @override
    def launch(self, number: int) -> None:
        begin_s = time.perf_counter()
        x = self._pack.vectors(self._weights.tensors())
        views = self._pack.views(x)
        statistics = [
            (views[position], views[position] * self.weight)
            for position in self._weights.positions_of_statistics()
        ]
        for vector, beyond in zip(x, self._beyond or [], strict=self._beyond is not None):
            vector.add_(beyond)
        # A statistic is not moved by a difference: its x is what the model holds, w times.
        for view, weighted in statistics:
            view.copy_(weighted)
        blocks = blocks_of(x, self._peers.driver.rank)
        self._pending = self._peers.launch(push_sum(self._in_round(number), blocks, self.weight))
        self.encode_s += time.perf_counter() - begin_s

    @override
    def merge(self, *, measures_drift: bool) -> Drift:
        assert self._pending is not None, "nothing was launched"
        blocks, self.weight = self._pending.wait()
        begin_s = time.perf_counter()
        tensors = self._weights.tensors()
        devices = [piece.device for piece in self._pack.pieces]
        x = [vector_of(block, device) for block, device in zip(blocks, devices, strict=True)]
        self._pack.write_(x if self.weight == 1 else [each / self.weight for each in x], tensors)
        self._beyond = None
        if self.weight != 1 or not self._pack.exact:
            z = self._pack.vectors(tensors)
            beyond = [vector - shown for vector, shown in zip(x, z, strict=True)]
            self._beyond = beyond if any(bool(vector.any()) for vector in beyond) else None
        self.encode_s += time.perf_counter() - begin_s
        return Drift()

    @override
    def state(self) -> CallbackState:
        views = [] if self._beyond is None else self._pack.views(self._beyond)
        beyond = {
            f"beyond/{name}": view
            for name, view in zip(self._weights.names, views, strict=bool(views))
        }
        return {
            "local": {"weight": self.weight, **beyond},
            "replicated": {"world_size": self._peers.driver.world_size},
        }

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """With another number of ranks every rank begins anew from the z it holds, with a weight of
        1.
        """
        beyond = {key: value for key, value in state["local"].items() if key.startswith("beyond/")}
        zeros = [torch.zeros_like(vector) for vector in self._pack.vectors(self._weights.tensors())]
        views = {
            f"beyond/{name}": view
            for name, view in zip(self._weights.names, self._pack.views(zeros), strict=True)
        }
        if beyond and {k: v.shape for k, v in beyond.items()} != {
            k: v.shape for k, v in views.items()
        }:
            raise CheckpointError(
                "the weights of push-sum were saved with another model or strategy"
            )
        same_world = state["replicated"]["world_size"] == self._peers.driver.world_size
        self.weight = float(state["local"]["weight"]) if same_world else 1.0
        self._beyond = zeros if same_world and beyond else None
        for key, value in beyond.items():
            views[key].copy_(value)


def blocks_of(vectors: list[torch.Tensor], rank: int) -> list[Block]:
    """`vectors` as they travel. Raises `NonFiniteError`."""
    require_finite(vectors, rank=rank)
    # Of a simulation's tensors, which have no content, there is nothing to bring to the host.
    return [vector if vector.is_meta else vector.cpu().numpy() for vector in vectors]  # type: ignore[misc]  # as arithmetic they are alike


def vector_of(block: Block, device: torch.device) -> torch.Tensor:
    """A block that has travelled, as a vector on `device`."""
    if isinstance(block, torch.Tensor):
        return block
    return torch.from_numpy(block).to(device)
