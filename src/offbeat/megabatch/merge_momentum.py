"""The momentum of merges, as published: w' = sum_i alpha_i w_i + gamma (w - w_before)

There is none in the first merge: the released code reads a buffer there that nothing has been
written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from offbeat.codec.tensor_bytes import packed, unpacked
from offbeat.errors import CheckpointError, WireError
from offbeat.transport.operations import Payload
from offbeat.weights.model_weights import restore_, wide

GAMMA: Final = 0.9
"""Of the momentum of merges."""


class MergeMomentum:
    """The models of the last two merges, in float32 or float64, the same on every rank.

    Args:
        parameters: by name.
        gamma: in [0, 1); 0: only the latest model is kept.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, gamma: float = GAMMA) -> None:
        self._parameters = parameters
        self._gamma = gamma
        self._latest: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """The first mega-batch begins with the parameters as they are now, unless a merge has
        already said with which it began.
        """
        if not self._latest:
            self._latest = {
                name: wide(parameter).clone() for name, parameter in self._parameters.items()
            }

    @property
    def latest(self) -> list[torch.Tensor]:
        """The model of the last merge, or with which the first mega-batch began."""
        return [*self._latest.values()]

    def added_to(self, merged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What becomes of the merged parameters, in the model's order, in the type in which means
        are computed. One that was frozen meanwhile stays at the mean.
        """
        return [
            mean + self._gamma * (self._latest[name] - self._before[name])
            if parameter.requires_grad and self._before
            else mean
            for (name, parameter), mean in zip(self._parameters.items(), merged, strict=False)
        ]

    def move_to(self, merged: Sequence[torch.Tensor]) -> None:
        """A merge is final, and `merged` is what it has made of the parameters."""
        self._before = self._latest if self._gamma else {}
        self._latest = {
            name: model.clone() for name, model in zip(self._parameters, merged, strict=False)
        }

    def state(self) -> dict[str, torch.Tensor]:
        """The models, with keys "latest/<name>" and "before/<name>". Tensors are live ones."""
        models = {"latest": self._latest, "before": self._before}
        return {
            f"{model}/{name}": tensor
            for model, tensors in models.items()
            for name, tensor in tensors.items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`. Raises `CheckpointError` when it does not fit the parameters."""
        models = {key.partition("/")[0] for key in state}
        live = {
            f"{model}/{name}": wide(parameter).clone()
            for model in models & {"latest", "before"}
            for name, parameter in self._parameters.items()
        }
        restore_(live, state, "the merges' momentum")
        self._latest, self._before = (
            {name: live[f"{model}/{name}"] for name in self._parameters if model in models}
            for model in ("latest", "before")
        )

    def to_bytes(self) -> bytes:
        """The state, for a worker that joins the run."""
        return packed(self.state())

    def from_bytes(self, payload: Payload) -> None:
        """Inverse of `to_bytes`. Raises `WireError` for what does not fit the parameters."""
        try:
            self.load(unpacked(payload, "the merges' momentum"))
        except CheckpointError as error:
            raise WireError(
                f"the merges' momentum came as {memoryview(payload).nbytes} bytes that do not fit"
                f" the model; do all ranks train the same model? ({error})"
            ) from error
