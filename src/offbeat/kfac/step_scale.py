"""How much `kl_clip` shortens steps, said where next to nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_high
from typing import Final

import torch

_WINDOW: Final = 50
_SHORT: Final = 0.2


class StepScale:
    """Keeps nu of `kfac.precondition` over some steps. All ranks have the same nu, so all say the
    same. Nothing of it is in checkpoints: a resumed run counts anew.

    Args:
        notify: is told, once, of 50 steps of which more than half were shortened below a fifth.

    Attributes:
        last: nu of the last step, a scalar tensor in (0, 1]; None where nothing limits steps.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.last: torch.Tensor | None = None
        self._notify = notify
        self._window: list[torch.Tensor] = []
        self._is_said = False

    def add(self, nu: torch.Tensor | None, kl_clip: float | None) -> None:
        """Of a step whose limit was `kl_clip`."""
        self.last = nu
        if nu is None or kl_clip is None or self._is_said:
            return
        self._window.append(nu)
        if len(self._window) == _WINDOW:
            # One transfer for all: on a GPU the host waits for each value that it asks for.
            scales = torch.stack(self._window).tolist()
            self._window.clear()
            self._is_said = (middle := median_high(scales)) < _SHORT
            if self._is_said:
                self._say(scales, middle, kl_clip)

    def _say(self, scales: list[float], middle: float, kl_clip: float) -> None:
        shortened = sum(scale < 1 for scale in scales)
        self._notify(
            f"kl_clip={kl_clip:g} shortened {shortened} of {_WINDOW} steps, more than half of them"
            f" to {middle:.2g} of their length or less, so that the learning rate does not decide"
            " how long they are. Where the loss hardly falls, set a larger kl_clip (ten times as"
            " much makes such steps 3.2 times as long), or momentum in the optimizer; kl_clip=None"
            " sets no limit, and then the learning rate or the damping may have to change"
        )
