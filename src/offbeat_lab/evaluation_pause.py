"""In a comparison of a script: no rank trains on while the leader evaluates.

Where ranks do not keep step, the others would go on meanwhile, and what the leader measures, and
all that follows, would have had more training than its steps and seconds say.

    the leader evaluates after step n      waits for those that have not done n steps
    the others                             do n steps, and begin none after them
    the leader begins step n + 1           and so do the others

A rank that was further than n stays so: nobody knew before that there would be an evaluation. It
pauses where a step begins and not where one ends, since a script may evaluate on all ranks
together.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Final

from offbeat.run.coordination import Coordinator

PATIENCE_S: Final = 10.0
"""For how long the leader waits for ranks that are behind: one may have left its loop."""

_LOOK_EVERY_S: Final = 2e-3
_never: Final = threading.Event()


class EvaluationPause:
    """One rank's side.

    Args:
        coordinator: of this run's ranks.
        inform: is told, once, that the leader has evaluated although ranks were behind.
        patience_s: for how long the leader waits for others.

    Attributes:
        is_evaluating: whether this rank leads and evaluates.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        inform: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._coordinator = coordinator
        self._inform = inform
        self._patience_s = patience_s
        self._was_told = False
        self.is_evaluating = False

    def step_done(self, step: int, seconds: float) -> None:
        """This rank has done `step` steps in `seconds` seconds of training."""
        self._coordinator.publish(self._place(self._coordinator.rank), json.dumps([step, seconds]))

    def begin(self, step: int, seconds: float) -> float:
        """This rank leads, and evaluates after `step` steps and `seconds` seconds of training.

        Returns:
            The training time in which all living ranks have done as many steps.
        """
        coordinator = self._coordinator
        self.is_evaluating = True
        coordinator.publish("evaluating", json.dumps([coordinator.rank, step]))
        polls = int(self._patience_s / _LOOK_EVERY_S)
        behind = []
        for rank in range(coordinator.world_size):
            if rank == coordinator.rank:
                continue
            done, took_s = self._progress(rank)
            while done < step and coordinator.is_alive(rank, step) and polls:
                polls -= 1
                _never.wait(_LOOK_EVERY_S)
                done, took_s = self._progress(rank)
            if coordinator.is_alive(rank, step):
                seconds = max(seconds, took_s)
                behind += [f"{done} steps of worker {rank}"] if done < step else []
        if behind and not self._was_told:
            self._was_told = True
            self._inform(
                f"what was measured after {step} steps is of a model with fewer: of"
                f" {', '.join(behind)} after {self._patience_s:g} s of waiting; let all workers do"
                " equally many steps"
            )
        return seconds

    def end(self) -> None:
        """This rank goes on training, or has come to its end."""
        if self.is_evaluating:
            self.is_evaluating = False
            self._coordinator.publish("evaluating", "")

    def wait(self, steps_done: int) -> None:
        """Return when this rank, which has done `steps_done` steps, may begin another one."""
        while text := self._coordinator.published("evaluating"):
            leader, step = json.loads(text)
            if steps_done < step or self._coordinator.leader != leader:
                return  # a leader that has died does not evaluate any more
            _never.wait(_LOOK_EVERY_S)

    def _progress(self, rank: int) -> tuple[int, float]:
        step, seconds = json.loads(self._coordinator.published(self._place(rank)) or "[0, 0.0]")
        return step, seconds

    def _place(self, rank: int) -> str:
        return f"progress/{rank}"
