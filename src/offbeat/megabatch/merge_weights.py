"""With which weights models are merged after a mega-batch, and the momentum that is added to
their mean.

    alpha_i = u_i / sum u, or b_i / sum b where all made the same number of updates
    as published, if every replica is regular: the largest alpha times 1.1, the smallest times 0.9,
    divided by their sum
    w' = sum_i alpha_i w_i + gamma (w - w_before), as published with a gamma of 0.9

Adaptive SGD, arXiv 2110.07029. A replica is regular if ||w_i|| / (number of parameters) is below a
threshold.

**Differences from the paper and its code.** Perturbed weights are divided by their sum: as
published they sum to 1 + delta (alpha_max - alpha_min), so the model grows in every merge. There is
no momentum in the first merge: the released code reads a buffer there that nothing has been written
to. Equal weights are left alone: there is no largest and no smallest.

In the paper all updates of a worker have b_i samples. Here the last one before a merge may have
fewer or more: it counts as so many b_i-ths of an update. The u_i are equal if they are so when
rounded, and then alpha_i = u_i b_i / sum u b. Where all updates have b_i samples this is the
published rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from offbeat.codec.tensor_bytes import to_bytes
from offbeat.errors import CheckpointError, ConfigError, WireError
from offbeat.transport.operations import Payload

ModelT = TypeVar("ModelT", float, NDArray[np.float64], torch.Tensor)


def normalised(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares divided by their sum.

    Args:
        shares: >= 0, not all zero.

    >>> normalised([3, 1])
    (0.75, 0.25)
    """
    total = sum(shares)
    if not (all(share >= 0 for share in shares) and 0 < total < math.inf):
        raise ConfigError(
            f"merge weights are {list(shares)}, allowed are numbers from 0, not all zero"
        )
    return tuple(share / total for share in shares)


def merge_weights(updates: Sequence[float], batch_sizes: Sequence[int]) -> tuple[float, ...]:
    """Each worker's weight in the merge, by updates unless these are equal, and then by batch
    sizes; they sum to 1. A worker that did nothing in this mega-batch has none.

    Args:
        updates: of each worker, counted by their samples: whole numbers where all its updates have
            as many as its batch size.
        batch_sizes: of each worker.

    >>> merge_weights([30, 10], [64, 64])
    (0.75, 0.25)
    >>> merge_weights([20, 20], [96, 32])
    (0.75, 0.25)
    >>> merge_weights([20, 19.5], [64, 128])
    (0.3389830508474576, 0.6610169491525424)
    """
    if len({round(made) for made in updates}) == 1:
        return normalised([made * size for made, size in zip(updates, batch_sizes, strict=True)])
    return normalised(updates)


DELTA: Final = 0.1
"""By which part the largest merge weight is raised, and the smallest lowered."""

REGULAR_BELOW: Final = 0.1
"""A replica is regular if its norm per parameter is less."""

GAMMA: Final = 0.9
"""Of the momentum of merges."""


def perturbed(weights: Sequence[float], norms_per_parameter: Sequence[float]) -> tuple[float, ...]:
    """More for the worker that did most and less for the one that did least, if no replica is
    large.

    Args:
        weights: of each worker, summing to 1.
        norms_per_parameter: ||w_i|| / (number of parameters), of each worker's model.

    >>> [round(weight, 3) for weight in perturbed([0.5, 0.3, 0.2], [0.01] * 3)]
    [0.534, 0.291, 0.175]
    """
    most, least = max(weights), min(weights)
    if most == least or max(norms_per_parameter) >= REGULAR_BELOW:
        return tuple(weights)
    changed = list(weights)
    changed[changed.index(most)] *= 1 + DELTA
    changed[changed.index(least)] *= 1 - DELTA
    return normalised(changed)


def with_momentum(
    merged: ModelT, latest: ModelT, before: ModelT | None, *, gamma: float = GAMMA
) -> ModelT:
    """sum_i alpha_i w_i + gamma (w - w_before).

    Args:
        merged: the weighted mean of the replicas.
        latest: the model that they began this mega-batch with.
        before: the model that they began the last one with; None in the first.
        gamma: in [0, 1).

    >>> with_momentum(3.0, 2.0, 1.0, gamma=0.5), with_momentum(3.0, 2.0, None)
    (3.5, 3.0)
    """
    return merged if before is None else merged + gamma * (latest - before)


class MergeMomentum:
    """The models of the last two merges, in float32 or float64, the same on every rank.

    Args:
        parameters: by name.
        gamma: in [0, 1).
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
                name: _widened(parameter).clone() for name, parameter in self._parameters.items()
            }

    def added_to(self, merged: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What becomes of the merged parameters, in the model's order, in the type in which means
        are computed. One that was frozen meanwhile stays at the mean.
        """
        return [
            with_momentum(mean, self._latest[name], self._before.get(name), gamma=self._gamma)
            if parameter.requires_grad
            else mean
            for (name, parameter), mean in zip(self._parameters.items(), merged, strict=False)
        ]

    def move_to(self, merged: Sequence[torch.Tensor]) -> None:
        """A merge is final, and `merged` is what it has made of the parameters."""
        self._before = self._latest
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
        models: dict[str, dict[str, torch.Tensor]] = {"latest": {}, "before": {}}
        for key, tensor in state.items():
            model, _, name = key.partition("/")
            if (
                model not in models
                or name not in self._parameters
                or tensor.shape != self._parameters[name].shape
            ):
                raise CheckpointError(
                    f"the merges' momentum was saved with another model or strategy: see {key!r}"
                )
            models[model][name] = tensor.to(_widened(self._parameters[name])).clone()
        for model, tensors in models.items():
            if tensors and (missing := self._parameters.keys() - tensors.keys()):
                raise CheckpointError(
                    "the merges' momentum was saved with another model or strategy: it lacks"
                    f" '{model}/{min(missing)}'"
                )
        self._latest, self._before = (
            {name: tensors[name] for name in self._parameters if tensors}
            for tensors in (models["latest"], models["before"])
        )

    def to_bytes(self) -> bytes:
        """The state in the format of safetensors, for a worker that joins the run."""
        # The format has no complex128, so complex numbers travel as pairs.
        real = {
            key: torch.view_as_real(tensor) if tensor.is_complex() else tensor
            for key, tensor in self.state().items()
        }
        return to_bytes(real)

    def from_bytes(self, payload: Payload) -> None:
        """Inverse of `to_bytes`. Raises `WireError` for what does not fit the parameters."""
        try:
            state = safetensors.torch.load(bytes(payload))
            for key, tensor in state.items():
                parameter = self._parameters.get(key.partition("/")[2])
                if parameter is not None and parameter.is_complex() and tensor.shape[-1:] == (2,):
                    state[key] = torch.view_as_complex(tensor)
            self.load(state)
        except (safetensors.SafetensorError, CheckpointError) as error:
            raise WireError(
                f"the merges' momentum came as {memoryview(payload).nbytes} bytes that do not fit"
                f" the model; do all ranks train the same model? ({error})"
            ) from error


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type in which means are computed: at least float32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
