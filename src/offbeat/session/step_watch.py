"""Notices a loop that does not step the attached optimizer, where the strategy acts at steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

_FIRST_LOOK: Final = 4
"""In which backward pass parameters are first compared; later looks are at 4 times the last one."""

_SAMPLE: Final = 64
"""How many elements of each parameter are compared."""


class StepWatch:
    """Counts backward passes until the optimizer is stepped.

    Many passes without a step may be one accumulated gradient. But if parameters change meanwhile,
    something else than the optimizer changes them, and the strategy does nothing.

    Args:
        parameters: the trainable ones.
        strategy: its name, for the warning.
        warn: is told what is wrong.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        strategy: str,
        warn: Callable[[str], None],
    ) -> None:
        self._parameters = parameters
        self._strategy = strategy
        self._warn = warn
        self._num_passes = 0
        self._next_look = _FIRST_LOOK
        self._first: list[torch.Tensor] = []
        self._over = False

    def backward_done(self) -> None:
        """A backward pass is over."""
        if self._over:
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self._first = self._samples()
        elif self._num_passes == self._next_look:
            self._next_look *= 4
            if not all(map(torch.equal, self._samples(), self._first)):
                self._say("and parameters have changed all the same")

    def stepped(self) -> None:
        """The optimizer is being stepped."""
        self._over, self._first = True, []

    def session_ends(self) -> None:
        """No step will follow."""
        if self._num_passes and not self._over:
            self._say("and the session ends")

    def _say(self, what: str) -> None:
        self.stepped()
        self._warn(
            f"the attached optimizer was not stepped in {self._num_passes} backward passes,"
            f" {what}: {self._strategy} acts when it is stepped, so it has done nothing to the"
            " model. Attach the optimizer that your loop steps, and change parameters by its step"
        )

    def _samples(self) -> list[torch.Tensor]:
        return [p.detach().reshape(-1)[:_SAMPLE].clone() for p in self._parameters]
