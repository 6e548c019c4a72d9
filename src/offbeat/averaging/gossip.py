"""Weights, averaged with a few ranks in every step: neighbours on a graph, or targets and sources
of push-sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.arithmetic.topologies import GossipPeers
from offbeat.averaging.periodic import Everyone
from offbeat.callbacks.callback import Callback
from offbeat.collectives.gossip import Block, neighbour_mean, push_sum
from offbeat.errors import CheckpointError
from offbeat.transport.driver import Pending
from offbeat.weights.model_weights import ModelWeights, Pack, require_finite
from offbeat.weights.statistics import merge_statistics


class GossipAverage(Callback):
    """What averages with a few ranks have in common.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
    """

    def __init__(self, weights: ModelWeights, peers: Everyone) -> None:
        self._weights, self._peers = weights, peers
        self._pack = Pack(weights.tensors())
        self._num_rounds = 0
        self._encode_s = 0.0

    def _finite(self, vectors: list[torch.Tensor]) -> list[Block]:
        """`vectors` as they travel. Raises `NonFiniteError`."""
        require_finite(vectors, rank=self._peers.driver.rank)
        # Of a simulation's tensors, which have no content, there is nothing to bring to the host.
        return [vector if vector.is_meta else vector.cpu().numpy() for vector in vectors]  # type: ignore[misc]  # as arithmetic they are alike

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_rounds, "encode_s": self._encode_s}


class NeighbourAverage(GossipAverage):
    """In every step, adds to the weights how far their neighbours' mean lay from them when the step
    began. Statistics take the mean itself.

    Weights leave as soon as backward begins, and their neighbours' are waited for when the
    optimizer has stepped, so they travel while gradients are computed.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
        row: of the mixing matrix: the weight of each rank to average with, this one included.
    """

    state_key: ClassVar[str] = "neighbour_average"

    def __init__(self, weights: ModelWeights, peers: Everyone, *, row: Mapping[int, float]) -> None:
        super().__init__(weights, peers)
        self._row = row
        self._sent: list[torch.Tensor] = []
        self._pending: Pending[list[Block]] | None = None

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """Of several passes in a step the first one counts: until the step the weights stay what
        they are.
        """
        self._launch()

    @override
    def on_before_step(self) -> None:
        self._launch()  # for a rank that ran no backward

    @override
    def on_after_step(self) -> None:
        blocks = self._launch().wait()
        self._pending = None
        begin_s = time.perf_counter()
        means = [_like(block, sent) for block, sent in zip(blocks, self._sent, strict=True)]
        changes = [mean - sent for mean, sent in zip(means, self._sent, strict=True)]
        tensors = self._weights.tensors()
        before, mean_views, change_views = map(self._pack.views, (self._sent, means, changes))
        for position in self._weights.positions_of_statistics():
            change_views[position].zero_()  # a statistic is not moved by a difference
            now = tensors[position].to(before[position].dtype)
            tensors[position].copy_(merge_statistics(now, mean_views[position], before[position]))
        self._pack.add_(changes, tensors)
        self._sent = []
        self._num_rounds += 1
        self._encode_s += time.perf_counter() - begin_s

    def _launch(self) -> Pending[list[Block]]:
        if self._pending is None:
            begin_s = time.perf_counter()
            self._sent = self._pack.vectors(self._weights.tensors())
            rank, blocks = self._peers.driver.rank, self._finite(self._sent)
            self._pending = self._peers.launch(neighbour_mean(rank, blocks, self._row))
            self._encode_s += time.perf_counter() - begin_s
        return self._pending

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {"replicated": {"num_rounds": self._num_rounds}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._num_rounds = _num_rounds(state)

    @override
    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class PushSum(GossipAverage):
    """After every optimizer step, a round of push-sum over weights x and their weight w; the model
    holds z = x / w.

    The optimizer moves z, and x moves by as much. What x has beyond z is kept apart; it is nothing
    as long as w is 1 and parameters are not of half precision. A statistic has nothing beyond: its
    x is w z.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
        in_round: whom this rank sends to and hears from, by the round's number.
    """

    state_key: ClassVar[str] = "push_sum"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        in_round: Callable[[int], GossipPeers],
    ) -> None:
        super().__init__(weights, peers)
        self._in_round = in_round
        self._weight = 1.0
        self._beyond: list[torch.Tensor] | None = None

    @override
    def averaging_weight(self) -> float:
        return self._weight

    @override
    def on_after_step(self) -> None:
        begin_s = time.perf_counter()
        tensors = self._weights.tensors()
        x = self._pack.vectors(tensors)
        views = self._pack.views(x)
        statistics = [
            (views[position], views[position] * self._weight)
            for position in self._weights.positions_of_statistics()
        ]
        for vector, beyond in zip(x, self._beyond or [], strict=self._beyond is not None):
            vector.add_(beyond)
        # A statistic is not moved by a difference: its x is what the model holds, w times.
        for view, weighted in statistics:
            view.copy_(weighted)
        blocks = self._finite(x)
        exchange = self._peers.launch(
            push_sum(self._in_round(self._num_rounds), blocks, self._weight)
        )
        self._encode_s += time.perf_counter() - begin_s
        blocks, self._weight = exchange.wait()
        begin_s = time.perf_counter()
        x = [_like(block, vector) for block, vector in zip(blocks, x, strict=True)]
        self._show(x, tensors)
        self._num_rounds += 1
        self._encode_s += time.perf_counter() - begin_s

    def _show(self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        self._pack.write_(
            x if self._weight == 1 else [vector / self._weight for vector in x], tensors
        )
        if self._weight == 1 and self._pack.exact:
            self._beyond = None
            return
        beyond = [vector - z for vector, z in zip(x, self._pack.vectors(tensors), strict=True)]
        self._beyond = beyond if any(bool(vector.any()) for vector in beyond) else None

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        views = [] if self._beyond is None else self._pack.views(self._beyond)
        beyond = {
            f"beyond/{name}": view
            for name, view in zip(self._weights.names, views, strict=bool(views))
        }
        return {
            "local": {"weight": self._weight, **beyond},
            "replicated": {
                "num_rounds": self._num_rounds,
                "world_size": self._peers.driver.world_size,
            },
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """With another number of ranks every rank begins anew from the z it holds, with a weight of
        1.
        """
        num_rounds = _num_rounds(state)
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
        self._weight = float(state["local"]["weight"]) if same_world else 1.0
        self._beyond = zeros if same_world and beyond else None
        for key, value in beyond.items():
            views[key].copy_(value)
        self._num_rounds = num_rounds

    @override
    def close(self) -> None:
        """The model keeps z."""


def _num_rounds(state: Mapping[str, Mapping[str, Any]]) -> int:
    if "num_rounds" not in state.get("replicated", {}):
        raise CheckpointError("the state lacks 'num_rounds'; it was saved by another strategy")
    return int(state["replicated"]["num_rounds"])


def _like(block: Block, vector: torch.Tensor) -> torch.Tensor:
    if isinstance(block, torch.Tensor):
        return block
    return torch.from_numpy(block).to(vector.device)
