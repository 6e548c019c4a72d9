"""An outer optimizer: the change that averaged weights made since the last average, treated as a
gradient.

    change   = anchor - mean
    momentum = beta momentum + change
    anchor   = anchor - alpha momentum                     (Nesterov: alpha (change + beta
    momentum))

With the mean of models after H local steps this is SlowMo (arXiv 1910.00643, algorithm 1) and, with
Nesterov's momentum and AdamW as the local optimizer, DiLoCo (arXiv 2311.08105, algorithm 1). alpha
= 1 and beta = 0 leave the mean as it is.

Difference from SlowMo: it divides the change by the local learning rate and multiplies by it again,
which is the same as long as that stays what it is. Here a new learning rate does not rescale the
momentum gathered so far.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offbeat.errors import CheckpointError


class OuterOptimizer:
    """The anchor and the momentum: the same on every rank, since the means they are made of are.
    float32 or float64.

    Args:
        parameters: by name.
        lr: alpha, > 0.
        momentum: beta, in [0, 1).
        nesterov: Nesterov's momentum in place of plain one.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], *, lr: float, momentum: float, nesterov: bool
    ) -> None:
        self._parameters = parameters
        self._lr = lr
        self._momentum_factor = momentum
        self._nesterov = nesterov
        self._anchor: dict[str, torch.Tensor] = {}
        self._momentum: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the parameters as they are for the anchor, unless there is one. To be called before
        they first move apart.
        """
        if not self._anchor:
            self._anchor = {
                name: _wide(parameter).clone() for name, parameter in self._parameters.items()
            }
            self._momentum = {
                name: torch.zeros_like(anchor) for name, anchor in self._anchor.items()
            }

    def step_(self) -> None:
        """The parameters hold the mean: replace them by where the outer optimizer takes them.

        One that was frozen meanwhile stays at the mean.
        """
        alpha, beta = self._lr, self._momentum_factor
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                self._anchor[name].copy_(parameter.detach())
                continue
            anchor, momentum = self._anchor[name], self._momentum[name]
            # What local steps began from is the anchor as the parameter's type holds it.
            change = _wide(anchor.to(parameter.dtype)) - parameter.detach()
            momentum.mul_(beta).add_(change)
            anchor.sub_(
                change.add_(momentum, alpha=beta) if self._nesterov else momentum, alpha=alpha
            )
            parameter.detach().copy_(anchor)

    def state(self) -> dict[str, torch.Tensor]:
        """By kind and parameter name; empty before `begin`. Tensors are live ones."""
        anchors = {f"anchor/{name}": tensor for name, tensor in self._anchor.items()}
        return anchors | {f"momentum/{name}": tensor for name, tensor in self._momentum.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`. Raises `CheckpointError` when it is of another model; nothing has
        changed then.
        """
        kept = {
            key: tensor for key, tensor in state.items() if key.startswith(("anchor/", "momentum/"))
        }
        expected = {
            f"{kind}/{name}": p.shape
            for name, p in self._parameters.items()
            for kind in ("anchor", "momentum")
        }
        if kept and {key: tensor.shape for key, tensor in kept.items()} != expected:
            odd = next(
                key
                for key in [*expected, *kept]
                if key not in kept or kept[key].shape != expected.get(key)
            )
            raise CheckpointError(
                f"the outer optimizer's state was saved with another model or strategy: see {odd!r}"
            )
        self._anchor, self._momentum = {}, {}
        if kept:
            self.begin()
            for key, live in self.state().items():
                live.copy_(kept[key])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
