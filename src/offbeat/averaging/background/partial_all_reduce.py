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
from offbeat.weights.model_weights import ModelWeights, Staging


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
        self._parameters = list(context.parameters.values())
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
        gradients = [None if p.grad is None else _dense(p.grad) for p in self._parameters]
        if not any(gradient is not None for gradient in gradients):
            return
        likes = self._weights.tensors()
        used = np.array([gradient is not None for gradient in gradients])
        gradients += [None] * (len(likes) - len(gradients))  # buffers have no gradient
        own = [
            torch.zeros_like(like) if gradient is None else gradient
            for gradient, like in zip(gradients, likes, strict=True)
        ]
        self._gradients.owe(self._staging.read(own), used)

    def _write_gradients(self, update: Values | None, used: UsedParameters) -> None:
        """Write `update` into `param.grad`, or None where no rank used the parameter or it is
        frozen on this rank.
        """
        gradients = [
            torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad
            for p in self._parameters
        ]
        if update is not None:
            buffers = self._weights.tensors()[len(gradients) :]
            self._staging.write_(update, [*gradients, *map(torch.empty_like, buffers)])
        for parameter, gradient, is_used in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used and parameter.requires_grad else None

    def _by_name(self, values: Values | None) -> dict[str, torch.Tensor]:
        weights = self._weights
        tensors = [torch.zeros_like(tensor) for tensor in weights.tensors()]
        if values is not None:
            self._staging.write_(values, tensors)
        return dict(zip(weights.names[: len(self._parameters)], tensors, strict=False))

    def _vector(self, by_name: Mapping[str, torch.Tensor]) -> Values:
        weights = self._weights
        likes = weights.tensors()
        own = [
            by_name[name].to(like)
            for name, like in zip(weights.names[: len(by_name)], likes, strict=False)
        ]
        return self._staging.read([*own, *map(torch.zeros_like, likes[len(own) :])])


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _always(version: int) -> bool:
    return True
