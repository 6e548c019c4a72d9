"""Gradients, averaged over whoever has some: who is late contributes what it owes later, and
nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from offbeat.averaging.background.averager import AnsweredPart, Beside
from offbeat.averaging.background.gradient_ledger import GradientReplica, Used
from offbeat.codec.model_wire import Values
from offbeat.errors import CheckpointError, UnsupportedError


class PartialExchange(AnsweredPart[GradientReplica]):
    """Before every optimizer step, gives this rank's gradient away and puts what has come in its
    place.

    Args:
        beside: what answers for this rank.
        parameters: by name.
        averages_models: whether a version averages models in the place of gradients.
    """

    state_key: ClassVar[str] = "partial_gradients"

    def __init__(
        self,
        beside: Beside[GradientReplica],
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        averages_models: Callable[[int], bool],
    ) -> None:
        super().__init__(beside)
        self._parameters = list(parameters.values())
        self._averages_models = averages_models

    @override
    def on_before_step(self) -> None:
        self._begin()
        gradients = [None if p.grad is None else _dense(p.grad) for p in self._parameters]
        if any(gradient is not None for gradient in gradients):
            likes = self._beside.weights.tensors()
            used = np.array([gradient is not None for gradient in gradients])
            gradients += [None] * (len(likes) - len(gradients))  # buffers have none
            own = [
                torch.zeros_like(like) if g is None else g
                for g, like in zip(gradients, likes, strict=True)
            ]
            self._replica.owe(self._beside.staging.read(own), used)
        while (version := self._arrive(_always)) is not None and self._averages_models(version):
            pass  # there is a gradient to average, too
        self._show(*self._replica.take_update())

    @override
    def on_closure(self) -> None:
        raise UnsupportedError(
            "EagerSGD exchanges gradients when optimizer.step() is called, and step(closure)"
            " computes them only then; call backward() first and step() without a closure"
        )

    @override
    def on_after_step(self) -> None:
        self._advance()
        self._load()

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """A gradient that no average has taken in is still owed; an average that has come may still
        have to be applied.
        """
        state = super().state_dict()
        owed, to_apply = self._replica.ledger()
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
        self._replica.resume(
            owed=self._vector(owed),
            to_apply=self._vector(to_apply),
            used=np.ones(len(shapes), np.bool_),
        )

    def _by_name(self, values: Values | None) -> dict[str, torch.Tensor]:
        tensors = [torch.zeros_like(tensor) for tensor in self._beside.weights.tensors()]
        if values is not None:
            self._beside.staging.write_(values, tensors)
        return dict(zip(self._beside.weights.names[: len(self._parameters)], tensors, strict=False))

    def _vector(self, by_name: Mapping[str, torch.Tensor]) -> Values:
        likes = self._beside.weights.tensors()
        own = [
            by_name[name].to(like)
            for name, like in zip(self._beside.weights.names[: len(by_name)], likes, strict=False)
        ]
        return self._beside.staging.read([*own, *map(torch.zeros_like, likes[len(own) :])])

    def _show(self, update: Values | None, used: Used) -> None:
        """Let `param.grad` hold the update; none where no rank used the parameter, or it is frozen
        here.
        """
        gradients = [
            torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad
            for p in self._parameters
        ]
        if update is not None:
            buffers = self._beside.weights.tensors()[len(gradients) :]
            self._beside.staging.write_(update, [*gradients, *map(torch.empty_like, buffers)])
        for parameter, gradient, is_used in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used and parameter.requires_grad else None


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _always(version: int) -> bool:
    return True
