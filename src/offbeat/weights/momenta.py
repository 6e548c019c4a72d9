"""The optimizer's momenta as part of what is averaged beside training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offbeat.errors import ConfigError
from offbeat.weights.optimizer_state import dense_state

_BY_OPTION = {"momentum": "momentum_buffer", "betas": "exp_avg"}
"""The option that says an optimizer has a momentum, and what it calls it in its state."""


def momentum_name(optimizer: torch.optim.Optimizer) -> str:
    """What `optimizer` calls a parameter's momentum. Raises `ConfigError` for one that has none."""
    for option, name in _BY_OPTION.items():
        if all(group.get(option) for group in optimizer.param_groups):
            return name
    raise ConfigError(
        "momenta='averaged' needs an optimizer with a momentum in all its groups, such as"
        f" SGD(momentum=0.9) or AdamW, got {type(optimizer).__name__} without; pass momenta='local'"
    )


class Momenta:
    """One tensor a parameter, in the parameters' order. Those that do not exist yet are zeros, and
    are not written to.

    Args:
        optimizer: the user's.
        parameters: by name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters.values())
        self._name = momentum_name(optimizer)

    @property
    def complete(self) -> bool:
        """Whether all of them exist."""
        return all(self._of(parameter) is not None for parameter in self._parameters)

    def tensors(self) -> Sequence[torch.Tensor]:
        found = [(parameter, self._of(parameter)) for parameter in self._parameters]
        return [
            torch.zeros_like(parameter) if momentum is None else momentum
            for parameter, momentum in found
        ]

    def _of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return dense_state(self._optimizer, parameter).get(self._name)
