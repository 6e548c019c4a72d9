"""Synchronous model averaging: all ranks' weights are drawn towards a central average model, which
moves with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from offbeat.averaging.periodic import (
    Drift,
    EncodedChanges,
    Everyone,
    WeightExchange,
    by_codec,
)
from offbeat.callbacks.callback import CallbackState
from offbeat.codec.topk_codec import WeightCodec
from offbeat.collectives.dense import dense_all_reduce
from offbeat.errors import CheckpointError
from offbeat.transport.driver import Pending
from offbeat.weights.model_weights import ModelWeights, Pack, real, require_finite


class CentralModel(WeightExchange):
    """Adds alpha (z - x) to the weights x, and the sum over ranks of alpha (x - z) to the central
    average model z.

    x is what the step began with, so that the sum travels beside the step. Of statistics, z is the
    plain mean over ranks, and a rank's own becomes (1 - alpha) x + alpha z.

    Args:
        weights: what is drawn together.
        peers: all ranks.
        alpha: how far, in (0, 1].
        codec: how differences travel, without a decay or clipping; None: whole.
    """

    state_key = "central_model"
    leaves_at = "step"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        alpha: float,
        codec: WeightCodec | None = None,
    ) -> None:
        self._weights, self._peers = weights, peers
        self._alpha = alpha
        self._pack = Pack(weights.tensors())
        self._central: list[torch.Tensor] = []
        self._corrections: list[torch.Tensor] = []
        self._sums: list[Pending[torch.Tensor]] = []
        self._coded: EncodedChanges | None = None
        if codec is not None:
            views = self._pack.views(self._pack.vectors(weights.tensors()))
            likes = zip(weights.parameters, views, strict=False)
            anchor = {name: torch.nn.Parameter(view) for name, view in likes}
            self._coded = EncodedChanges(anchor, by_codec(codec), peers)

    @override
    def begin(self) -> None:
        if not self._central:
            self._central = self._pack.vectors(self._weights.tensors())

    @override
    def launch(self, number: int) -> None:
        begin_s = time.perf_counter()
        tensors = self._weights.tensors()
        vectors = self._pack.vectors(tensors)
        require_finite(vectors, rank=self._peers.driver.rank)
        self._corrections = [
            vector.sub_(central).mul_(self._alpha)
            for vector, central in zip(vectors, self._central, strict=True)
        ]
        travelling = [correction.clone() for correction in self._corrections]
        sums = self._pack.views(travelling)
        statistics = self._weights.positions_of_statistics()
        for position in statistics:
            sums[position].copy_(tensors[position].detach())
        if self._coded is not None:
            self._coded.launch(sums[: statistics.start])
            whole = [sums[position] for position in statistics]
            travelling = Pack(whole).vectors(whole)
        self._sums = [self._peers.launch(dense_all_reduce(total)) for total in travelling]
        self.encode_s += time.perf_counter() - begin_s

    @override
    def merge(self, *, measures_drift: bool) -> Drift:
        totals = [pending.wait() for pending in self._sums]
        if self._coded is not None:
            totals = self._decoded(self._coded, totals)
        begin_s = time.perf_counter()
        tensors = self._weights.tensors()
        self._draw_statistics(tensors, totals)
        for central, total in zip(self._central, totals, strict=True):
            central.add_(total)
        views = self._pack.views(self._corrections)
        for name, tensor, view in zip(self._weights.names, tensors, views, strict=True):
            parameter = self._weights.parameters.get(name)
            if parameter is None or parameter.requires_grad:
                real(tensor).sub_(view.to(real(tensor).dtype))
        self.encode_s += time.perf_counter() - begin_s
        return Drift()

    def _decoded(
        self, coded: EncodedChanges, statistics: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The sums, in vectors of all that is averaged. In the corrections there is left what has
        travelled of this rank's.

        Args:
            coded: brings the mean over ranks of corrections of parameters.
            statistics: the sums of these.
        """
        totals = [torch.empty_like(vector) for vector in self._corrections]
        sums, place = self._pack.views(totals), self._weights.positions_of_statistics()
        spent_s = coded.encode_s
        means = coded.mean()
        self.encode_s += coded.encode_s - spent_s
        for total, mean in zip(sums, means, strict=False):
            torch.mul(mean, self._peers.driver.world_size, out=total)
        corrections = self._pack.views(self._corrections)
        for correction, owed in zip(corrections, coded.owed(), strict=False):
            correction.sub_(owed)
            owed.zero_()
        whole = Pack([sums[position] for position in place])
        for position, view in zip(place, whole.views(statistics), strict=True):
            sums[position].copy_(view)
        return totals

    def _draw_statistics(
        self, tensors: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]
    ) -> None:
        """Draw statistics to their central values, replace these by the means, and leave no change
        of either in `totals` and the corrections. All terms are plain means, which stay in range.
        """
        central, sums, corrections = (
            self._pack.views(vectors) for vectors in (self._central, totals, self._corrections)
        )
        for position in self._weights.positions_of_statistics():
            tensor, centre = tensors[position], central[position]
            tensor.copy_((1 - self._alpha) * tensor.to(centre.dtype) + self._alpha * centre)
            centre.copy_(sums[position] / self._peers.driver.world_size)
            for difference in (sums[position], corrections[position]):
                difference.zero_()

    @override
    def state(self) -> CallbackState:
        views = self._pack.views(self._central) if self._central else []
        replicated = {
            f"centre/{name}": view for name, view in zip(self._weights.names, views, strict=False)
        }
        local = {} if self._coded is None else self._coded.state()["local"]
        return {"replicated": replicated, "local": local}

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        if self._coded is not None:  # of which nothing is owed between two averages
            self._coded.load({**self._coded.state(), "local": state.get("local", {})})
        kept = {k: v for k, v in state["replicated"].items() if isinstance(v, torch.Tensor)}
        self._central = []
        if not kept:
            return
        self.begin()
        live = self.state()["replicated"]
        if {k: v.shape for k, v in kept.items()} != {k: v.shape for k, v in live.items()}:
            self._central = []
            raise CheckpointError("the central model was saved with another model or strategy")
        for key, tensor in live.items():
            tensor.copy_(kept[key])

    @override
    def close(self) -> None:
        for pending in self._sums:
            pending.cancel()
