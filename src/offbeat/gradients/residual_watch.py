"""Says so when far more is sent, or owed, than ever before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

LOOK_INTERVAL: Final = 10
"""Exchanges from one look at the residual's norm to the next: a look reads the residual once."""

RUNAWAY_FACTOR: Final = 10.0
"""Growth that is no longer usual: of what is sent over any earlier exchange, and of the residual
over any earlier look. What is sent grows by about one gradient from exchange to exchange. Where
nothing at all is sent, a residual that begins at nothing doubles from the first look to the second
one, and grows ever more slowly afterwards; momentum correction makes that four times.
"""


class ResidualWatch:
    """Watches one bucket. Looks at what is sent in each exchange, which shows one gradient that is
    far too large at once, and at the residual now and then, which shows growth over several steps.

    Args:
        warn: tells the user.
        rank: this rank, for the warning.
        clips: whether gradients are clipped before selection.
    """

    def __init__(self, warn: Callable[[str], None], *, rank: int, clips: bool) -> None:
        self._warn = warn
        self._rank = rank
        self._clips = clips
        self._num_exchanges = 0
        self._k = 0
        self._most_sent = 0.0
        self._most_owed = 0.0
        self._grown = 1.0  # by what factor what is owed has grown beside its gradients

    def begin_anew(self) -> None:
        """What comes next is not to be compared with what was: its unit has changed."""
        self._k, self._num_exchanges, self._most_sent, self._most_owed = 0, 0, 0.0, 0.0
        self._grown = 1.0

    def all_was_sent(self) -> None:
        """Nothing is owed any more that could have grown."""
        self._grown = 1.0

    def grow(self, factor: float) -> None:
        """What is owed has been multiplied by at most `factor`, which says nothing of gradients."""
        self._grown *= factor

    def after_exchange(self, residual: torch.Tensor, k: int, *, sent_norm: float) -> None:
        """An exchange has left `residual`; this rank picked `k` entries of norm `sent_norm`."""
        if k != self._k:
            # Fewer entries leave a larger residual behind, which means nothing. Their norm is
            # smaller, that of more entries larger by no more than the root of their number.
            self._most_sent *= math.sqrt(max(1.0, k / max(1, self._k)))
            self._k, self._num_exchanges, self._most_owed = k, 0, 0.0
        self._num_exchanges += 1
        # What had grown goes in turns: so many of the elements in each exchange.
        self._grown = max(1.0, self._grown * (1 - k / max(k, residual.numel())))
        usual = self._most_sent * self._grown
        if sent_norm > RUNAWAY_FACTOR * usual > 0:
            self._warn(
                f"rank {self._rank} has sent entries far larger than ever before: their norm is"
                f" {sent_norm:.3g}, and it was at most {usual:.3g}. The rest of such a"
                " gradient is owed and comes back over many steps, which clipping after backward()"
                f" does not stop; {self._fix()}"
            )
        self._most_sent = max(self._most_sent, sent_norm / self._grown)
        if self._num_exchanges % LOOK_INTERVAL == 0:
            self._look(residual)

    def _look(self, residual: torch.Tensor) -> None:
        norm = float(torch.linalg.vector_norm(residual))
        usual = self._most_owed * self._grown
        if norm > RUNAWAY_FACTOR * usual > 0:
            self._warn(
                f"the residual of rank {self._rank} has run away: its norm is {norm:.3g}, and"
                f" {LOOK_INTERVAL} exchanges ago it was at most {usual:.3g}. Gradients"
                " far larger than usual are owed now and come back over many steps, which clipping"
                f" after backward() does not stop; {self._fix()}"
            )
        self._most_owed = max(self._most_owed, norm / self._grown)

    def _fix(self) -> str:
        if self._clips:
            return "lower clip_norm or the learning rate, or look at the data"
        return "pass clip_norm to the strategy, or look at the data"
