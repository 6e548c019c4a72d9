"""The momentum of merges: gamma (w - w_before) is added in each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from offbeat.errors import CheckpointError, WireError
from offbeat.megabatch.merge_weights import with_momentum
from offbeat.transport.operations import Payload
from offbeat.weights.model_weights import Pack


class MergeMomentum:
    """What the last two merges left, in float32 or float64, the same on every rank.

    Args:
        parameters: by name.
        gamma: in [0, 1).
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, gamma: float) -> None:
        self._parameters = parameters
        self._gamma = gamma
        self._latest: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the parameters as they are for where the first mega-batch begins, unless that is
        known.
        """
        if not self._latest:
            self._latest = {
                name: _wide(parameter).clone() for name, parameter in self._parameters.items()
            }

    def add_(self) -> None:
        """The parameters hold the mean: add the momentum. One that was frozen meanwhile stays at
        the mean.
        """
        self.begin()
        for name, parameter in self._parameters.items():
            latest, before = self._latest[name], self._before.get(name)
            merged = _wide(parameter)
            if parameter.requires_grad:
                merged = with_momentum(merged, latest, before, gamma=self._gamma)
                parameter.detach().copy_(merged)
            self._before[name], self._latest[name] = latest, merged.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """By kind and parameter name. Tensors are live ones."""
        kept = {"latest": self._latest, "before": self._before}
        return {
            f"{kind}/{name}": tensor
            for kind, tensors in kept.items()
            for name, tensor in tensors.items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        kinds: dict[str, dict[str, torch.Tensor]] = {"latest": {}, "before": {}}
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if (
                kind not in kinds
                or name not in self._parameters
                or tensor.shape != self._parameters[name].shape
            ):
                raise CheckpointError(
                    f"the merges' momentum was saved with another model or strategy: see {key!r}"
                )
            kinds[kind][name] = tensor.to(_wide(self._parameters[name])).clone()
        self._latest, self._before = kinds["latest"], kinds["before"]

    def to_bytes(self) -> bytes:
        """For a worker that comes in."""
        kinds = [list(tensors.values()) for tensors in (self._latest, self._before) if tensors]
        return b"".join(
            vector.cpu().numpy().tobytes() for kind in kinds for vector in Pack(kind).vectors(kind)
        )

    def from_bytes(self, payload: Payload) -> None:
        """Inverse of `to_bytes`. Raises `WireError` for another number of bytes."""
        like = [_wide(parameter) for parameter in self._parameters.values()]
        pack = Pack(like)
        sizes = [
            (piece, vector.numel())
            for piece, vector in zip(pack.pieces, pack.vectors(like), strict=True)
        ]
        whole, left = (
            sum(piece.dtype.itemsize * size for piece, size in sizes),
            memoryview(payload).cast("B"),
        )
        if whole == 0 or len(left) % whole or len(left) > 2 * whole:
            raise WireError(
                f"the momentum of {whole} bytes came as {len(left)} bytes; do all ranks train the"
                " same model?"
            )
        kinds: list[dict[str, torch.Tensor]] = [{}, {}]
        for kind in kinds[: len(left) // whole]:
            vectors = []
            for piece, size in sizes:
                number = np.dtype(np.float64 if piece.dtype == torch.float64 else np.float32)
                vector, left = np.frombuffer(left, number, size), left[size * number.itemsize :]
                vectors.append(torch.from_numpy(vector.copy()).to(piece.device))
            aside = [torch.empty_like(tensor) for tensor in like]
            pack.write_(vectors, aside)
            kind.update(zip(self._parameters, aside, strict=True))
        self._latest, self._before = kinds


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
