"""Weights, averaged with a few ranks, whole or in encoded changes: neighbours on a graph, targets
and sources of push-sum, or a partner drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from typing_extensions import override

from offbeat.arithmetic.topologies import GossipPeers, random_partner
from offbeat.averaging.periodic import Everyone, ExchangeWithPeers, TakeMean, WeightExchange
from offbeat.callbacks.callback import CallbackState
from offbeat.codec.arithmetic import Message
from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.device_copies import numpy_dtype
from offbeat.codec.option_value import OptionValue
from offbeat.codec.sparse import add_owed
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import AllChanges, WeightCodec
from offbeat.collectives.gossip import Block, neighbour_mean, push_sum, swap
from offbeat.errors import ConfigError
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import ModelWeights, Pack, require_finite, restore_
from offbeat.weights.statistics import merge_statistics


class NeighbourMean(ExchangeWithPeers[list[Block]]):
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
        super().__init__(peers)
        self._weights, self._row = weights, row
        self._pack = Pack(weights.tensors())
        self._sent: list[torch.Tensor] = []

    @override
    def _leave(self, number: int) -> Collective[list[Block]]:
        self._sent = self._pack.vectors(self._weights.tensors())
        rank = self._peers.driver.rank
        return neighbour_mean(rank, blocks_of(self._sent, rank), self._row)

    @override
    def _take(self, came: list[Block]) -> None:
        means = vectors_of(came, self._pack)
        changes = [mean - sent for mean, sent in zip(means, self._sent, strict=True)]
        tensors = self._weights.tensors()
        before, mean_views, change_views = map(self._pack.views, (self._sent, means, changes))
        for position in self._weights.positions_of_statistics():
            change_views[position].zero_()  # a statistic is not moved by a difference
            now = tensors[position].to(before[position].dtype)
            tensors[position].copy_(merge_statistics(now, mean_views[position], before[position]))
        self._pack.add_(changes, tensors)
        self._sent = []


class _ChangeWire:
    """How the changes of one vector travel.

    Args:
        codec: which entries, and in how many bits; None: all of them, exactly.
        like: a vector of its length and type.
    """

    def __init__(self, codec: WeightCodec | None, like: torch.Tensor) -> None:
        codec = codec or AllChanges("float32")
        n, entries, dtype = like.numel(), codec.entries, numpy_dtype(like.dtype)
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
            return self._all.encode_(vector - known, self._tally)
        selection = self._selector.select(
            known.clone(), vector, k=self._k, weight=-1.0, state=self.selector_state
        )
        self.selector_state = dict(selection.state)
        return self._entries.encode(selection.sparse, self._tally)[0]

    def apply_(self, message: Message, known: torch.Tensor) -> None:
        """Bring `known` nearer."""
        if self._all is not None:
            self._all.decode_to(message, known, adds=True)
        else:
            add_owed(known, self._entries.decode(message)[0])


class ChangesRound(NamedTuple):
    """What one rank does in a round of `NeighbourChanges`. A link is what one rank has told others,
    by the same name on all who hold it.

    Attributes:
        told: this rank's links of the round, and whom each of them tells.
        heard: the others' links, and who tells them.
        pairs: two links, and by how much of their difference this rank's weights move.
    """

    told: Mapping[str, Sequence[int]]
    heard: Mapping[str, int]
    pairs: Sequence[tuple[str, str, float]]


def ring_round(rank: int, row: Mapping[int, float]) -> ChangesRound:
    """Of the weighted mean with neighbours, to whom a rank tells the same.

    Args:
        rank: this rank.
        row: of the mixing matrix, which is symmetric: the weight of each rank to average with, this
            one included; they add up to 1.
    """
    neighbours = [peer for peer in row if peer != rank]
    return ChangesRound(
        told={f"{rank}": neighbours},
        heard={f"{peer}": peer for peer in neighbours},
        pairs=[(f"{peer}", f"{rank}", row[peer]) for peer in neighbours],
    )


def push_round(rank: int, peers: GossipPeers) -> ChangesRound:
    """Of a push to as many ranks as push to this one."""
    told = {f"{rank}>{peer}": [peer] for peer in peers.targets}
    heard = {f"{peer}>{rank}": peer for peer in peers.sources}
    share = 1 / (1 + len(peers.targets))
    pairs = [(theirs, mine, share) for theirs, mine in zip(heard, told, strict=True)]
    return ChangesRound(told=told, heard=heard, pairs=pairs)


class NeighbourChanges(ExchangeWithPeers[dict[str, list[Message]]]):
    """A mean with peers of which only encoded changes of parameters travel (CHOCO-SGD, arXiv
    1902.00340).

        known_l     what a rank, and those whom it tells by link l, alike, hold of it
        send        encode(x_i - known_l) to those whom l tells, for each link l of this rank
        known_l     += decoded, for each link that this rank tells or hears in the round
        x_i         += gamma sum over pairs (l, m) of w (known_l - known_m)

    Neighbours on a ring tell each other by one link a rank, and w is W_ij. In a push each target
    has a link of its own, because it hears in some rounds alone, and w is the share that is pushed.

    **An exchange does not change the mean over ranks**, whatever the codec loses: what one rank
    adds for a link another one subtracts, because both hold the same bits of it. What was not sent
    is part of the next difference.

    The first exchange by a link, and the first with another number of ranks than before, is exact,
    so that ranks may start anywhere. Statistics always travel whole. A rank keeps a vector of
    parameters for each link that it tells or hears.

    Args:
        weights: what is averaged.
        peers: carries rounds out.
        whole: averages statistics with the same peers.
        in_round: what this rank does, by the round's number.
        codec: how changes travel, without a decay or clipping.
    """

    state_key = "neighbour_average"
    leaves_at: ClassVar[Literal["backward", "step", "end"]] = "backward"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        whole: Callable[[ModelWeights], WeightExchange],
        in_round: Callable[[int], ChangesRound],
        codec: WeightCodec,
    ) -> None:
        super().__init__(peers)
        statistics = replace(weights, parameters={})
        self._statistics = whole(statistics) if statistics.names else None
        self._parameters, self._codec, self._in_round = weights.parameters, codec, in_round
        self._pack = Pack([*self._parameters.values()])
        # Coarse changes would feed their own errors back in whole steps, the more the fewer travel.
        is_fine = codec.density == 1 and codec.entries.values.bits >= 4
        self._gamma = 1.0 if is_fine else math.sqrt(codec.density) / 2
        self._known: dict[str, list[torch.Tensor]] = {}  # by link, once something was sent
        self._wires: dict[str, list[_ChangeWire]] = {}  # by link, likewise
        # What one exchange leaves for its end:
        self._round = ChangesRound({}, {}, [])
        self._exact = [_ChangeWire(None, vector) for vector in self._vectors()]
        self._messages: dict[str, list[Message]] = {}

    def _vectors(self) -> list[torch.Tensor]:
        return self._pack.vectors([*self._parameters.values()])

    def _wires_of(self, link: str) -> list[_ChangeWire]:
        return self._wires[link] if link in self._known else self._exact

    def _open(self, link: str) -> None:
        vectors = self._vectors()
        self._known[link] = [torch.zeros_like(vector) for vector in vectors]
        self._wires[link] = [_ChangeWire(self._codec, vector) for vector in vectors]

    @override
    def _leave(self, number: int) -> Collective[dict[str, list[Message]]]:
        if self._statistics is not None:
            self._statistics.launch(number)
        vectors, self._round = self._vectors(), self._in_round(number)
        require_finite(vectors, rank=self._peers.driver.rank)
        zeros = [torch.zeros_like(vector) for vector in vectors]
        self._messages = {
            link: [
                wire.encode(vector, here)
                for wire, vector, here in zip(
                    self._wires_of(link), vectors, self._known.get(link, zeros), strict=True
                )
            ]
            for link in self._round.told
        }
        told = [
            (peer, self._messages[link])
            for link, peers in self._round.told.items()
            for peer in peers
        ]
        return swap(told, self._round.heard, len(vectors))

    @override
    def merge(self) -> None:
        super().merge()
        if self._statistics is not None:
            self._statistics.merge()

    @override
    def _take(self, came: dict[str, list[Message]]) -> None:
        for link, theirs in (came | self._messages).items():
            wires = self._wires_of(link)
            if link not in self._known:
                self._open(link)
            for wire, message, vector in zip(wires, theirs, self._known[link], strict=True):
                wire.apply_(message, vector)
        changes = [torch.zeros_like(vector) for vector in self._vectors()]
        for one, other, weight in self._round.pairs:
            both = zip(changes, self._known[one], self._known[other], strict=True)
            for change, theirs_known, own in both:
                change.add_(theirs_known - own, alpha=self._gamma * weight)
        self._pack.add_(changes, [*self._parameters.values()])
        self._messages = {}

    @override
    def state(self) -> CallbackState:
        local: dict[str, Any] = {}
        for link, vectors in self._known.items():
            local |= self._pack.named(f"known/{link}", self._parameters, vectors)
            for place, wire in enumerate(self._wires[link]):
                local |= {f"{key}/{link}/{place}": v for key, v in wire.selector_state.items()}
        return {"local": local, "replicated": {"world_size": self._peers.driver.world_size}}

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """With another number of ranks, or from a run without a codec, the next exchange by each
        link is exact.
        """
        local, self._known, self._wires = state["local"], {}, {}
        if state["replicated"].get("world_size") != self._peers.driver.world_size:
            return
        saved = {key: value for key, value in local.items() if key.startswith("known/")}
        for link in {key.split("/")[1] for key in saved}:
            self._open(link)
        live = {k: v for k, v in self.state()["local"].items() if k.startswith("known/")}
        restore_(live, saved, "what neighbours hold")
        for link, wires in self._wires.items():
            for place, wire in enumerate(wires):
                for key in wire.selector_state:
                    if (name := f"{key}/{link}/{place}") in local:
                        wire.selector_state[key] = local[name]

    @override
    def close(self) -> None:
        super().close()
        if self._statistics is not None:
            self._statistics.close()


class PushedChanges(NeighbourChanges):
    """Of push-sum where every rank is pushed to as often as it pushes, so that its weight is 1."""

    state_key = "push_sum"
    leaves_at = "end"


class PushSum(ExchangeWithPeers[tuple[list[Block], float]]):
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
        self, weights: ModelWeights, peers: Everyone, *, in_round: Callable[[int], GossipPeers]
    ) -> None:
        super().__init__(peers)
        self._weights, self._in_round = weights, in_round
        self._pack = Pack(weights.tensors())
        self._beyond: list[torch.Tensor] | None = None

    @override
    def _leave(self, number: int) -> Collective[tuple[list[Block], float]]:
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
        return push_sum(self._in_round(number), blocks, self.weight)

    @override
    def _take(self, came: tuple[list[Block], float]) -> None:
        blocks, self.weight = came
        tensors, x = self._weights.tensors(), vectors_of(blocks, self._pack)
        self._pack.write_(x if self.weight == 1 else [each / self.weight for each in x], tensors)
        self._beyond = None
        if self.weight != 1 or not self._pack.exact:
            z = self._pack.vectors(tensors)
            beyond = [vector - shown for vector, shown in zip(x, z, strict=True)]
            self._beyond = beyond if any(bool(vector.any()) for vector in beyond) else None

    @override
    def state(self) -> CallbackState:
        beyond = self._pack.named("beyond", self._weights.names, self._beyond or [])
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
        vectors = self._pack.vectors(self._weights.tensors())
        if beyond:
            live = self._pack.named("beyond", self._weights.names, vectors)
            restore_(live, beyond, "what push-sum has beyond the weights")
        same_world = state["replicated"]["world_size"] == self._peers.driver.world_size
        self.weight = float(state["local"]["weight"]) if same_world else 1.0
        self._beyond = vectors if same_world and beyond else None


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
    """The weights of a random pair become what each rank's `rule` makes of their mean
    (NoLoCo, arXiv 2506.10911).

        at each average, the ranks are paired at random, the same pairs on every rank:
            mean    = (x_i + x_j) / 2                   a rank that is left over: x_i
            anchor  = the outer optimizer's step from this rank's anchor, with anchor - mean
            x       = anchor

    No rank waits for more than one other, and nothing is reduced over all. With SGD as the outer
    optimizer the mean over ranks of their anchors is the one anchor that DiLoCo would make of the
    same local models; how far ranks stay apart depends on how often they meet.

    Cost per average: n elements sent by each rank, in one message for each 8 MiB, whatever P.

    Differences from the paper: its outer momentum has a further term that pulls pairs together,
    whose formula was not at hand; here the mean of weights alone does that. Statistics of buffers
    go to the pair's mean, and counters stay local.

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


def blocks_of(vectors: list[torch.Tensor], rank: int) -> list[Block]:
    """`vectors` as they travel. Raises `NonFiniteError`."""
    require_finite(vectors, rank=rank)
    # Of a simulation's tensors, which have no content, there is nothing to bring to the host.
    return [vector if vector.is_meta else vector.cpu().numpy() for vector in vectors]  # type: ignore[misc]  # as arithmetic they are alike


def vectors_of(blocks: Sequence[Block], pack: Pack) -> list[torch.Tensor]:
    """What has travelled, as vectors of `pack`."""
    return [
        block if isinstance(block, torch.Tensor) else torch.from_numpy(block).to(piece.device)
        for block, piece in zip(blocks, pack.pieces, strict=True)
    ]
