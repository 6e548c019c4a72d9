"""CROSSBOW's synchronous model averaging: every model is drawn towards a central average model z
(PVLDB 12(11), 2019; arXiv 1901.02244).

    every tau steps, on each rank j:  c_j = alpha (x_j - z)
        x_j = x_j - eta gradient(x_j) - c_j
        z   = z + sum over j of c_j

With `codec`, c_j is what has travelled of alpha (x_j - z), so the sum of z and of all x_j is what
it would be without one.

Cost per average: one all-reduce of the weights, beside the optimizer's step; in lock-step. With a
codec 2(P-1)/P n coded values, or P - 1 times a message of k entries, sent by each rank.

Differences from the paper: the codec; the central model has no momentum, and is not copied into
the models when the learning rate falls, since nothing here sees that; `Session.averaged_model` is
the mean of the models, not z; statistics are drawn to their plain mean.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from offbeat.averaging.periodic import (
    EncodedChanges,
    Everyone,
    GrowingPeriod,
    PeriodicAverage,
    WeightExchange,
    coded_changes,
)
from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore, UpToOne
from offbeat.collectives.dense import dense_all_reduce
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec
from offbeat.transport.driver import Pending
from offbeat.weights.model_weights import ModelWeights, Pack, real, require_finite, restore_


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


class CentralModel(WeightExchange):
    """Adds alpha (z - x) to the weights x, and the sum over ranks of alpha (x - z) to the central
    average model z.

    x is what the step began with, so that the sum travels beside the step. Of statistics, z is the
    plain mean over ranks, and a rank's own becomes (1 - alpha) x + alpha z. What is frozen is not
    drawn step by step: x and z become the plain mean.

    Args:
        weights: what is drawn together.
        peers: all ranks.
        alpha: how far, in (0, 1].
        changes: how differences travel, by a codec without a decay or clipping; None: whole.
    """

    state_key = "central_model"
    leaves_at = "step"

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        alpha: float,
        changes: EncodedChanges | None = None,
    ) -> None:
        self._weights, self._peers = weights, peers
        self._alpha, self._coded = alpha, changes
        self._pack = Pack(weights.tensors())
        self._central: list[torch.Tensor] = []
        # What one average leaves for its end:
        self._frozen: list[int] = []
        self._corrections: list[torch.Tensor] = []
        self._sums: list[Pending[torch.Tensor]] = []

    @override
    def begin(self) -> None:
        if not self._central:
            self._central = self._pack.vectors(self._weights.tensors())

    @property
    def _plain(self) -> list[int]:
        """The positions of tensors of which the plain mean is taken."""
        return [*self._frozen, *self._weights.positions_of_statistics()]

    @override
    def launch(self, number: int) -> None:
        tensors, parameters = self._weights.tensors(), self._weights.parameters.values()
        vectors = self._pack.vectors(tensors)
        require_finite(vectors, rank=self._peers.driver.rank)
        self._frozen = [place for place, each in enumerate(parameters) if not each.requires_grad]
        self._corrections = [
            vector.sub_(central).mul_(self._alpha)
            for vector, central in zip(vectors, self._central, strict=True)
        ]
        corrections = self._pack.views(self._corrections)
        for position in self._plain:
            corrections[position].zero_()
        if self._coded is None:
            travelling = [correction.clone() for correction in self._corrections]
            sums = self._pack.views(travelling)
            for position in self._plain:
                sums[position].copy_(real(tensors[position]))
        else:
            self._coded.launch(corrections[: len(parameters)])
            plain = [tensors[position] for position in self._plain]
            travelling = Pack(plain).vectors(plain)
        self._sums = [self._peers.launch(dense_all_reduce(total)) for total in travelling]

    @override
    def merge(self) -> None:
        totals = [pending.wait() for pending in self._sums]
        if self._coded is not None:
            totals = self._decoded(self._coded, totals)
        begin_s = time.perf_counter()
        tensors, statistics = self._weights.tensors(), self._weights.positions_of_statistics()
        central, sums = self._pack.views(self._central), self._pack.views(totals)
        for position in self._plain:
            tensor, centre = real(tensors[position]), central[position]
            mean = sums[position] / self._peers.driver.world_size
            # All terms are plain means, which stay in range, and none is a period old.
            drawn = (1 - self._alpha) * tensor.to(centre.dtype) + self._alpha * mean
            tensor.copy_(drawn if position in statistics else mean)
            centre.copy_(mean)
            sums[position].zero_()
        for vector, total in zip(self._central, totals, strict=True):
            vector.add_(total)
        for tensor, correction in zip(tensors, self._pack.views(self._corrections), strict=True):
            real(tensor).sub_(correction.to(real(tensor).dtype))
        self._sums, self._corrections = [], []
        self.encode_s += time.perf_counter() - begin_s

    def _decoded(self, coded: EncodedChanges, plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums, in vectors of all that is averaged. In the corrections there is left what has
        travelled of this rank's.

        Args:
            coded: brings the mean over ranks of corrections of parameters.
            plain: the sums of what travels as it is.
        """
        totals = [torch.empty_like(vector) for vector in self._corrections]
        sums, spent_s = self._pack.views(totals), coded.encode_s
        means = coded.mean()
        self.encode_s += coded.encode_s - spent_s
        for total, mean in zip(sums, means, strict=False):
            torch.mul(real(mean), self._peers.driver.world_size, out=total)
        corrections = self._pack.views(self._corrections)
        for correction, owed in zip(corrections, coded.owed(), strict=False):
            correction.sub_(owed)
            owed.zero_()
        whole = Pack([sums[position] for position in self._plain])
        for position, view in zip(self._plain, whole.views(plain), strict=True):
            sums[position].copy_(view)
        return totals

    @override
    def state(self) -> CallbackState:
        replicated = self._pack.named("centre", self._weights.names, self._central)
        local = {} if self._coded is None else self._coded.state()["local"]
        return {"replicated": replicated, "local": local}

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        if self._coded is not None:  # of which nothing is owed between two averages
            self._coded.load({**self._coded.state(), "local": state.get("local", {})})
        kept = {k: v for k, v in state["replicated"].items() if isinstance(v, torch.Tensor)}
        self._central = []
        if kept:
            vectors = self._pack.vectors(self._weights.tensors())
            live = self._pack.named("centre", self._weights.names, vectors)
            restore_(live, kept, "the central model")
            self._central = vectors

    @override
    def close(self) -> None:
        for pending in self._sums:
            pending.cancel()
