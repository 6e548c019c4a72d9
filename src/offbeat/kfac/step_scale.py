"""How long steps are, said where next to nothing is left of them: by `kl_clip`, or because
preconditioned gradients are short by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from statistics import median_high
from typing import Final

import torch

from offbeat.kfac.options import Grafting

_WINDOW: Final = 50
_SHORT: Final = 0.2
_SHORTER: Final = 0.5


class StepScale:
    """Keeps nu of `kfac.precondition` over some steps. All ranks have the same nu, so all say the
    same. Nothing of it is in checkpoints: a resumed run counts anew.

    Args:
        optimizer: takes the steps. Momentum makes up for some of what is lost. Adam and its like
            take steps of the same length whatever nu is, so nothing is said of any but SGD.
        notify: is told, once, of 50 steps of which more than half were shortened below a fifth, or
            below what momentum makes a fifth.

    Attributes:
        last: nu of the last step, a scalar tensor in (0, 1]; None where nothing limits steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, notify: Callable[[str], None]) -> None:
        self.last: torch.Tensor | None = None
        self._optimizer, self._notify = optimizer, notify
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
            middle = median_high(scales)
            self._is_said = middle * _gain_of(self._optimizer) < _SHORT
            if self._is_said:
                self._say(scales, middle, kl_clip)

    def _say(self, scales: list[float], middle: float, kl_clip: float) -> None:
        shortened = sum(scale < 1 for scale in scales)
        self._notify(
            f"kl_clip={kl_clip:g} shortened {shortened} of {_WINDOW} steps, more than half of them"
            f" to {middle:.2g} of their length or less, so that the learning rate does not decide"
            " how long they are. Where the loss hardly falls, set a larger kl_clip (ten times as"
            " much makes such steps 3.2 times as long), or more momentum in the optimizer;"
            " kl_clip=None sets no limit, and then the learning rate or the damping may have to"
            " change"
        )


class ShortLayers:
    """Compares preconditioned gradients with plain ones during the first steps. All ranks have the
    same ones, so all say the same.

    Args:
        optimizer: takes the steps. As in `StepScale` nothing is said of any but SGD.
        grafting: only with "none" may steps be shorter.
        notify: is told, once, of layers whose preconditioned gradients were less than half as long
            as the plain ones in more than half of 50 steps.

    Attributes:
        is_watching: whether `add` wants to know of the next step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grafting: Grafting,
        notify: Callable[[str], None],
    ) -> None:
        self.is_watching = grafting == "none" and isinstance(optimizer, torch.optim.SGD)
        self._notify = notify
        self._shares: dict[str, list[torch.Tensor]] = {}
        self._num_steps = 0

    def add(self, shares: Mapping[str, torch.Tensor]) -> None:
        """Of a step: how long layers' preconditioned gradients are over plain ones."""
        for name, share in shares.items():
            self._shares.setdefault(name, []).append(share)
        self._num_steps += 1
        if self._num_steps == _WINDOW:
            self.is_watching = False
            middles = {
                name: median_high(torch.stack(each).tolist()) for name, each in self._shares.items()
            }
            self._shares.clear()
            short = sorted((middle, name) for name, middle in middles.items() if middle < _SHORTER)
            if short:
                self._say(short, len(middles))

    def _say(self, short: list[tuple[float, str]], num_layers: int) -> None:
        share, name = short[0]
        self._notify(
            f"the preconditioned gradients of {len(short)} of K-FAC's {num_layers} layers are"
            f" shorter than plain ones, that of {name!r} {share:.2g} times as long in half of"
            f" {_WINDOW} steps: at a learning rate that was chosen for plain gradients these layers"
            ' are trained slowly. Set grafting="floor", which makes them as long as plain ones, or'
            " a larger learning rate"
        )


def _gain_of(optimizer: torch.optim.Optimizer) -> float:
    """By how much momentum lengthens what a gradient moves in all; inf where that does not depend
    on the gradient's length.
    """

    def gain(momentum: float, dampening: float) -> float:
        if not momentum:
            return 1.0
        return (1 - dampening) / (1 - momentum) if momentum < 1 else inf

    if not isinstance(optimizer, torch.optim.SGD):
        return inf
    return min(gain(group["momentum"], group["dampening"]) for group in optimizer.param_groups)
