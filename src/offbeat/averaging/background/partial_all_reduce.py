"""Partial all-reduce of gradients, the exchange of eager-SGD (arXiv 1908.04207).

A late rank contributes its gradient to a later average, and no gradient is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from offbeat.averaging.background import group_average
from offbeat.averaging.background.averager import BackgroundCallback, GroupOf
from offbeat.averaging.background.gradient_ledger import GradientLedger, UsedParameters
from offbeat.callbacks.context import Context
from offbeat.codec.model_wire import Values
from offbeat.errors import CheckpointError
from offbeat.weights.model_weights import ModelWeights, Staging, dense_gradient


class PartialAllReduce(BackgroundCallback):
    """Before every optimizer step, contributes this rank's gradient and replaces it by the averages
    that have come.

    Args:
        context, weights, group_of: as of `BackgroundCallback`.
        staging: of the weights.
        gradients: the model that is averaged, with its gradients.
        averages_models: whether a version averages models instead of gradients.
    """

    state_key: ClassVar[str] = "partial_gradients"

    def __init__(
        self,
        context: Context,
        weights: ModelWeights,
        gradients: GradientLedger,
        *,
        staging: Staging,
        group_of: GroupOf,
        averages_models: Callable[[int], bool],
    ) -> None:
        super().__init__(
            context,
            weights,
            gradients,
            staging=staging,
            serve=group_average.serve,
            group_of=group_of,
            num_flags=len(context.parameters),
        )
        self._gradients = gradients
        self._parameters = [*weights.parameters.values()]
        self._averages_models = averages_models

    @override
    def on_before_update(self) -> None:
        self._publish()
        self._owe_gradients()
        # A version that averaged models has not taken the gradient, so another one follows.
        while (version := self._arrive(_always)) is not None and self._averages_models(version):
            pass
        self._write_gradients(*self._gradients.take_update())

    @override
    def on_after_step(self) -> None:
        self._advance()
        self._load()

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        state = super().state_dict()
        owed, to_apply = self._gradients.accounts()
        local = {f"to_apply/{name}": tensor for name, tensor in self._by_name(to_apply).items()}
        return {"local": state["local"] | local, "additive": self._by_name(owed)}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        owed = state.get("additive", {})
        shapes = {name: tensor.shape for name, tensor in self._by_name(None).items()}
        if {name: tensor.shape for name, tensor in owed.items()} != shapes:
            raise CheckpointError(
                "the gradients that are owed were saved with another model or strategy"
            )
        super().load_state_dict(state)
        to_apply = {
            name: state["local"].get(f"to_apply/{name}", torch.zeros(shape))
            for name, shape in shapes.items()
        }
        self._gradients.restore(
            owed=self._vector(owed),
            to_apply=self._vector(to_apply),
            used=np.ones(len(shapes), np.bool_),
        )

    def _owe_gradients(self) -> None:
        """Add `param.grad` to what this rank owes."""
        used = np.array([parameter.grad is not None for parameter in self._parameters])
        if used.any():
            own = map(dense_gradient, self._parameters)
            self._gradients.owe(self._staging.read([*own, *self._zeros_of_buffers()]), used)

    def _zeros_of_buffers(self) -> list[torch.Tensor]:
        """In the places of statistics, which have no gradient."""
        return [*map(torch.zeros_like, self._weights.statistics())]

    def _write_gradients(self, update: Values | None, used: UsedParameters) -> None:
        """Write `update` into `param.grad`, or None where no rank used the parameter or it is
        frozen on this rank.
        """
        gradients = [
            torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad
            for p in self._parameters
        ]
        if update is not None:
            self._staging.write_(update, [*gradients, *self._zeros_of_buffers()])
        for parameter, gradient, is_used in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used and parameter.requires_grad else None

    def _by_name(self, values: Values | None) -> dict[str, torch.Tensor]:
        tensors = [torch.zeros_like(tensor) for tensor in self._weights.tensors()]
        if values is not None:
            self._staging.write_(values, tensors)
        return dict(zip(self._weights.parameters, tensors, strict=False))

    def _vector(self, by_name: Mapping[str, torch.Tensor]) -> Values:
        own = [by_name[name].to(like) for name, like in self._weights.parameters.items()]
        return self._staging.read([*own, *self._zeros_of_buffers()])


def _always(version: int) -> bool:
    return True
