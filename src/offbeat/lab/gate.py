"""Whose turn it is to train, where several runs share a machine."""

from __future__ import annotations

import math
import threading

_POLL_S = 0.2


class Gate:
    """Lets a worker train up to a step that its supervisor names, so that several runs can take
    turns on one machine.
    """

    def __init__(self, until_step: float) -> None:
        self._until_step = until_step
        self._moved = threading.Condition()

    @classmethod
    def open(cls) -> Gate:
        """One that is never closed."""
        return cls(math.inf)

    def closed(self, steps_done: int) -> bool:
        return steps_done >= self._until_step

    def wait(self, steps_done: int, give_up: threading.Event) -> None:
        """Return once more than `steps_done` steps are allowed, or `give_up` is set."""
        with self._moved:
            while self.closed(steps_done) and not give_up.is_set():
                self._moved.wait(_POLL_S)

    def move(self, until_step: int) -> None:
        """Allow steps up to `until_step`."""
        with self._moved:
            self._until_step = until_step
            self._moved.notify_all()
