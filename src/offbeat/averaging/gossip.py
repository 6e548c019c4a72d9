"""Weights, averaged with a few ranks in every step: neighbours on a graph, whole or in encoded
changes, or targets and sources of push-sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from offbeat.arithmetic.topologies import GossipPeers
from offbeat.averaging.periodic import Drift, Everyone, WeightExchange
from offbeat.callbacks.callback import CallbackState
from offbeat.codec.arithmetic import Message
from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.residual import add_owed
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import AllChanges, WeightCodec
from offbeat.collectives.gossip import Block, neighbour_mean, push_sum, swap
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


class _ChangeWire:
    """How the changes of one vector travel.

    Args:
        codec: which entries, and in how many bits; None: all of them, exactly.
        like: a vector of its length and type.
    """

    def __init__(self, codec: WeightCodec | None, like: torch.Tensor) -> None:
        codec = codec or AllChanges("float32")
        n, entries = like.numel(), codec.entries
        dtype: np.dtype[np.floating] = np.dtype(str(like.dtype).removeprefix("torch."))
        self._selector, self._k = entries.selector, min(n, max(1, round(codec.density * n)))
        self.selector_state = dict(entries.selector.initial_state())
        self._tally = Tally.of_nobody(0)
        self._entries = entries.wire(n, num_parameters=0, dtype=dtype)
        self._all = None
        if codec.density == 1:
            self._all = DenseWire(num_parameters=0, values=entries.values.suited_to(dtype))

    def encode(self, vector: torch.Tensor, known: torch.Tensor) -> Message:
        """What brings `known` nearer to `vector`."""
        if self._all is not None:
            return self._all.encode(vector - known, self._tally)[0]
        selection = self._selector.select(
            known.clone(), vector, k=self._k, weight=-1.0, state=self.selector_state
        )
        self.selector_state = dict(selection.state)
        return self._entries.encode(selection.sparse, self._tally)[0]

    def apply_(self, message: Message, known: torch.Tensor) -> None:
        """Bring `known` nearer."""
        if self._all is not None:
            known.add_(self._all.decode(message, known)[0])
        else:
            add_owed(known, self._entries.decode(message)[0])


class NeighbourChanges(WeightExchange):
    """`NeighbourMean` of which only encoded changes of parameters travel (CHOCO-SGD, arXiv
    1902.00340).

        known_j     what rank j and its neighbours, alike, hold of x_j
        send        encode(x_i - known_i) to the neighbours
        known_j     += decoded, for j = i and each neighbour
        x_i         += gamma sum over j of W_ij (known_j - known_i)

    **An exchange does not change the mean over ranks**, whatever the codec loses: of a pair of
    neighbours one adds exactly what the other one subtracts, because W is symmetric and both hold
    the same bits of known_i and known_j. What was not sent is part of the next difference.

    The first exchange, and the first with another number of ranks than before, is exact, so that
    ranks may start anywhere. Statistics always travel whole. A rank keeps one vector of parameters
    for itself and one for each neighbour.

    Args:
        weights: what is averaged.
        peers: carries rounds with them out.
        row: of the mixing matrix, which is symmetric: the weight of each rank to average with, this
            one included; they add up to 1.
        codec: how changes travel, without a decay or clipping.
    """

    state_key = "neighbour_average"
    leaves_at = "backward"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        row: Mapping[int, float],
        codec: WeightCodec,
    ) -> None:
        statistics = replace(weights, parameters={})
        self._statistics = NeighbourMean(statistics, peers, row=row) if statistics.names else None
        self._parameters, self._peers, self._row = weights.parameters, peers, row
        self._pack = Pack([*weights.parameters.values()])
        vectors = self._vectors()
        self._coded, self._exact = (
            [_ChangeWire(each, vector) for vector in vectors] for each in (codec, None)
        )
        # Coarse changes would feed their own errors back in whole steps, the more the fewer travel.
        is_fine = codec.density == 1 and codec.entries.values.bits >= 4
        self._gamma = 1.0 if is_fine else math.sqrt(codec.density) / 2
        self._known: dict[int, list[torch.Tensor]] = {}  # by rank, once something was sent
        self._messages: list[Message] = []
        self._pending: Pending[dict[int, list[Message]]] | None = None

    def _vectors(self) -> list[torch.Tensor]:
        return self._pack.vectors([*self._parameters.values()])

    def _no_vectors(self) -> dict[int, list[torch.Tensor]]:
        return {rank: [torch.zeros_like(v) for v in self._vectors()] for rank in self._row}

    @property
    def _wires(self) -> list[_ChangeWire]:
        return self._coded if self._known else self._exact

    @override
    def launch(self, number: int) -> None:
        if self._statistics is not None:
            self._statistics.launch(number)
        begin_s = time.perf_counter()
        rank, vectors = self._peers.driver.rank, self._vectors()
        require_finite(vectors, rank=rank)
        known = self._known.get(rank) or [torch.zeros_like(vector) for vector in vectors]
        self._messages = [
            wire.encode(vector, here)
            for wire, vector, here in zip(self._wires, vectors, known, strict=True)
        ]
        neighbours = [peer for peer in self._row if peer != rank]
        self._pending = self._peers.launch(swap(neighbours, self._messages))
        self.encode_s += time.perf_counter() - begin_s

    @override
    def merge(self, *, measures_drift: bool) -> Drift:
        assert self._pending is not None, "nothing was launched"
        messages = self._pending.wait()
        begin_s = time.perf_counter()
        messages[self._peers.driver.rank] = self._messages
        wires, self._known = self._wires, self._known or self._no_vectors()
        for rank, known in self._known.items():
            for wire, message, vector in zip(wires, messages[rank], known, strict=True):
                wire.apply_(message, vector)
        self._pack.add_(self._changes(), [*self._parameters.values()])
        self._messages = []
        self.encode_s += time.perf_counter() - begin_s
        if self._statistics is not None:
            self._statistics.merge(measures_drift=False)
        return Drift()

    def _changes(self) -> list[torch.Tensor]:
        mine = self._known[self._peers.driver.rank]
        changes = [torch.zeros_like(vector) for vector in mine]
        for rank, known in self._known.items():
            for change, theirs, own in zip(changes, known, mine, strict=True):
                change.add_(theirs - own, alpha=self._gamma * self._row[rank])
        return changes

    @override
    def state(self) -> CallbackState:
        names = [*self._parameters]
        return {
            "local": {
                **{
                    f"known/{rank}/{name}": view
                    for rank, vectors in self._known.items()
                    for name, view in zip(names, self._pack.views(vectors), strict=True)
                },
                **{
                    f"{key}/{place}": value
                    for place, wire in enumerate(self._coded)
                    for key, value in wire.selector_state.items()
                },
            },
            "replicated": {"world_size": self._peers.driver.world_size},
        }

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """With another number of ranks, or from a run without a codec, the next exchange is
        exact.
        """
        local, self._known = state["local"], {}
        saved = {key: value for key, value in local.items() if key.startswith("known/")}
        if state["replicated"].get("world_size") != self._peers.driver.world_size or not saved:
            return
        known = self._no_vectors()
        views = {
            f"known/{rank}/{name}": view
            for rank, vectors in known.items()
            for name, view in zip(self._parameters, self._pack.views(vectors), strict=True)
        }
        if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in views.items()}:
            raise CheckpointError("what neighbours hold was saved with another model or strategy")
        for key, view in views.items():
            view.copy_(saved[key])
        self._known = known
        for place, wire in enumerate(self._coded):
            for key in wire.selector_state:
                if f"{key}/{place}" in local:
                    wire.selector_state[key] = local[f"{key}/{place}"]

    @override
    def close(self) -> None:
        if self._statistics is not None:
            self._statistics.close()
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
