"""Learning rates that differ from the user's during optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepRates:
    """Changes an optimizer's learning rates for one step at a time. Before and after the step they
    are what the user has set, so that schedulers see no other ones.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[Any] = []

    def scale(self, change: Callable[[Any], Any]) -> None:
        """Let the coming step have `change` of each learning rate."""
        # A step that raised was not followed by `restore`.
        self.restore()
        self._before = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = change(group["lr"])

    def restore(self) -> None:
        """The step is over."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            group["lr"] = before
        self._before = []
