"""Synchronous model averaging: all ranks' weights are drawn towards a central average model, which
moves with them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.collectives.dense import dense_all_reduce
from offbeat.errors import CheckpointError
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.weights.model_weights import ModelWeights, Pack, require_finite


class CentralModelAverage(Callback):
    """In every step number `n period` adds alpha (z - x) to the weights x, and the sum over ranks
    of alpha (x - z) to z.

    x is what the step began with, so that the sum travels beside the step. Of statistics, z is the
    plain mean over ranks, and a rank's own becomes (1 - alpha) x + alpha z.

    Args:
        weights: what is drawn together.
        driver: carries collectives out.
        stream: this part's channels.
        period: steps between averages, >= 1.
        alpha: how far, in (0, 1].
        momentum: of the central average model, in [0, 1).
    """

    state_key: ClassVar[str] = "central_model"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        driver: Driver,
        stream: Stream,
        period: int,
        alpha: float,
        momentum: float,
    ) -> None:
        self._weights, self._driver, self._stream = weights, driver, stream
        self._period, self._alpha, self._momentum = period, alpha, momentum
        self._pack = Pack(weights.tensors())
        self._central: list[torch.Tensor] = []
        self._moved: list[torch.Tensor] = []
        self._corrections: list[torch.Tensor] = []
        self._sums: list[Pending[torch.Tensor]] = []
        self._num_steps = self._num_averages = 0
        self._encode_s = 0.0

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        # The central model begins where the model does, copied as late as possible, since the user
        # may load weights after attaching.
        self._begin()

    @override
    def on_before_step(self) -> None:
        self._begin()
        if (self._num_steps + 1) % self._period:
            return
        begin_s = time.perf_counter()
        vectors = self._pack.vectors(self._weights.tensors())
        require_finite(vectors, rank=self._driver.rank)
        self._corrections = [
            vector.sub_(central).mul_(self._alpha)
            for vector, central in zip(vectors, self._central, strict=True)
        ]
        travelling = [correction.clone() for correction in self._corrections]
        tensors, sums = self._weights.tensors(), self._pack.views(travelling)
        for position in self._weights.positions_of_statistics():
            sums[position].copy_(tensors[position].detach())
        self._sums = [
            self._driver.launch(dense_all_reduce(total), self._stream.next())
            for total in travelling
        ]
        self._encode_s += time.perf_counter() - begin_s

    @override
    def on_closure(self) -> None:
        self.on_before_step()

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        if not self._sums:
            return
        totals = [pending.wait() for pending in self._sums]
        begin_s = time.perf_counter()
        self._sums = []
        tensors = self._weights.tensors()
        self._draw_statistics(tensors, totals)
        for central, moved, total in zip(self._central, self._moved, totals, strict=True):
            moved.mul_(self._momentum).add_(total)
            central.add_(moved)
        frozen = [
            name in self._weights.parameters and not self._weights.parameters[name].requires_grad
            for name in self._weights.names
        ]
        for tensor, view, stays in zip(
            tensors, self._pack.views(self._corrections), frozen, strict=True
        ):
            if not stays:
                real = (
                    torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
                )
                real.sub_(view.to(real.dtype))
        self._num_averages += 1
        self._encode_s += time.perf_counter() - begin_s

    def _draw_statistics(
        self, tensors: Sequence[torch.Tensor], totals: Sequence[torch.Tensor]
    ) -> None:
        """Draw statistics to their central values, replace these by the means, and leave no change
        of either in `totals` and the corrections. All terms are plain means, which stay in range.
        """
        central, sums, moved, corrections = (
            self._pack.views(vectors)
            for vectors in (self._central, totals, self._moved, self._corrections)
        )
        for position in self._weights.positions_of_statistics():
            tensor, centre = tensors[position], central[position]
            tensor.copy_((1 - self._alpha) * tensor.to(centre.dtype) + self._alpha * centre)
            centre.copy_(sums[position] / self._driver.world_size)
            for difference in (sums[position], moved[position], corrections[position]):
                difference.zero_()

    def _begin(self) -> None:
        if not self._central:
            self._central = self._pack.vectors(self._weights.tensors())
            self._moved = [torch.zeros_like(central) for central in self._central]

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_averages, "encode_s": self._encode_s}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        kept = {
            f"{kind}/{name}": view
            for kind, vectors in (("centre", self._central), ("moved", self._moved))
            if vectors
            for name, view in zip(self._weights.names, self._pack.views(vectors), strict=True)
        }
        return {
            "replicated": {"num_steps": self._num_steps, "num_averages": self._num_averages, **kept}
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_steps" not in saved:
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        kept = {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}
        self._central = []
        if kept:
            self._begin()
            live = {
                key: value
                for key, value in self.state_dict()["replicated"].items()
                if isinstance(value, torch.Tensor)
            }
            if {key: tensor.shape for key, tensor in kept.items()} != {
                key: tensor.shape for key, tensor in live.items()
            }:
                self._central = []
                raise CheckpointError("the central model was saved with another model or strategy")
            for key, tensor in live.items():
                tensor.copy_(kept[key])
        self._num_steps, self._num_averages = int(saved["num_steps"]), int(saved["num_averages"])

    @override
    def close(self) -> None:
        """The weights stay as they are: the user's."""
        for pending in self._sums:
            pending.cancel()
