"""Learning rates for ranks that step with their own gradients, where the user's is for their mean.

An optimizer that divides by the root of squared gradients, such as Adam, takes steps of about the
learning rate's length where gradients are noise, whatever their size. In the mean over n ranks that
step alone the noise of n steps cancels, and sqrt(n) of their length with it; a step with the mean
gradient keeps its length. So where noise dominates, n ranks that average their models advance
sqrt(n) times less than with S-SGD at the same learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.weights.learning_rates import StepRates


class SquareRootRate(Callback):
    """Multiplies learning rates by sqrt(n) in each step, for n ranks that average their models.

    Args:
        optimizer: the user's.
        num_ranks: the number of ranks that average at present, >= 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_ranks: Callable[[], int]) -> None:
        self._rates = StepRates(optimizer)
        self._num_ranks = num_ranks

    @override
    def on_before_step(self) -> None:
        factor = math.sqrt(self._num_ranks())
        self._rates.scale(lambda rate: rate * factor)

    @override
    def on_closure(self) -> None:
        self.on_before_step()

    @override
    def on_after_step(self) -> None:
        self._rates.restore()

    @override
    def close(self) -> None:
        self._rates.restore()
