"""Says so when a residual's norm runs away: much more is owed than ever before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

LOOK_INTERVAL: Final = 10
"""Exchanges from one look at the norm to the next: a look reads the residual once."""

RUNAWAY_FACTOR: Final = 10.0
"""Growth over any earlier look that is no longer usual. Where nothing at all is sent, a residual
that begins at nothing doubles from the first look to the second one, and grows ever more slowly
afterwards; momentum correction makes that four times.
"""


class ResidualWatch:
    """Looks at one bucket's residual now and then, and warns when it has grown tenfold.

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
        self._k: int | None = None
        self._largest = 0.0

    def after_exchange(self, residual: torch.Tensor, k: int) -> None:
        """An exchange of `k` entries has left `residual`."""
        if k != self._k:  # fewer entries leave a larger residual behind, which means nothing
            self._k, self._largest, self._num_exchanges = k, 0.0, 0
        self._num_exchanges += 1
        if self._num_exchanges % LOOK_INTERVAL:
            return
        norm = float(torch.linalg.vector_norm(residual))
        if norm > RUNAWAY_FACTOR * self._largest > 0:
            self._warn(
                f"the residual of rank {self._rank} has run away: its norm is {norm:.3g}, and"
                f" {LOOK_INTERVAL} exchanges ago it was at most {self._largest:.3g}. A gradient far"
                " larger than usual is owed now and comes back over many steps, which clipping"
                f" after backward() does not stop; {self._fix()}"
            )
        self._largest = max(self._largest, norm)

    def _fix(self) -> str:
        if self._clips:
            return "lower clip_norm or the learning rate, or look at the data"
        return "pass clip_norm to the strategy, or look at the data"
