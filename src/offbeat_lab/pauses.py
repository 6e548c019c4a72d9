"""What makes a rank pause between steps, or stop for good.

While other runs have their turn, and while a checkpoint is written or the metric measured, a rank's
clock stands still. Where ranks wait for each other, but not in every step or not all for all, one
that has come there before the others would get for nothing what it has to wait for them, and the
slow ones would catch up meanwhile. So clocks stop when the last rank has done its steps, and until
then every rank's clock goes on.
"""

from __future__ import annotations

import math
import threading
import time

from offbeat.run.coordination import Coordinator
from offbeat.run.step_recorder import RankRun, StepRecorder

_POLL_S = 0.2
_STOP = "offbeat-lab/stop"


def stop_at(coordinator: Coordinator, step: int) -> None:
    """Ask all ranks to stop once they have done `step` steps, unless a rank has already named a
    step.
    """
    coordinator.store.compare_set(_STOP, "", str(step))


def stop_step(coordinator: Coordinator) -> int | None:
    """After how many steps all ranks are to stop, if a rank asked for it. One round trip to the
    store.
    """
    return int(coordinator.store.get(_STOP)) if coordinator.store.check([_STOP]) else None


class StepLimit:
    """The number of steps up to which a worker may train. Its supervisor raises it, so that several
    runs can take turns on one machine.

    Args:
        until_step: the first limit.
        raised: is notified when the limit is raised.

    Attributes:
        ends_turns: whether there is a limit, as where this run takes turns with others.
    """

    def __init__(self, until_step: float, raised: threading.Condition | None = None) -> None:
        self._until_step = until_step
        self._raised = threading.Condition() if raised is None else raised
        self.ends_turns = math.isfinite(until_step)

    @classmethod
    def unlimited(cls) -> StepLimit:
        """One that is never reached."""
        return cls(math.inf)

    def is_reached(self, steps_done: int) -> bool:
        return steps_done >= self._until_step

    def wait_beyond(self, steps_done: int, give_up: threading.Event) -> None:
        """Return once more than `steps_done` steps are allowed, or `give_up` is set."""
        with self._raised:
            # A signal handler sets `give_up` and may take no lock, so that nothing is notified
            # then: look again now and then.
            while self.is_reached(steps_done) and not give_up.is_set():
                self._raised.wait(_POLL_S)

    def raise_to(self, until_step: int) -> None:
        """Allow steps up to `until_step`."""
        with self._raised:
            self._until_step = until_step
            self._raised.notify_all()


class Pauses:
    """What makes this rank pause, or stop for good.

    Args:
        run: this rank's.
        recorder: of its steps.
        limit: the steps that it may do.
        stop_requested: is set when this rank has been asked to stop.
        meets: whether ranks wait for each other before their clocks stop. Not where they have
            nothing to do with each other.
    """

    def __init__(
        self,
        run: RankRun,
        recorder: StepRecorder,
        limit: StepLimit,
        stop_requested: threading.Event,
        *,
        meets: bool,
    ) -> None:
        self._meets = meets
        self._run = run
        self._recorder = recorder
        self._limit = limit
        self._stop_requested = stop_requested

    def is_next(self, steps_done: int) -> bool:
        """Whether `wait_for_turn` would wait."""
        return self._limit.is_reached(steps_done)

    def meet(self, steps_done: int, *, clocks_stop: bool = False) -> float:
        """Wait for the other ranks where clocks stop after `steps_done` steps and the run goes on:
        at the end of a turn, and where `clocks_stop` says so. Return for how many seconds, which
        are this run's.
        """
        coordinator = self._run.coordinator
        clocks_stop |= self._limit.ends_turns and self._limit.is_reached(steps_done)
        if not (self._meets and clocks_stop) or steps_done >= self._run.schedule.target:
            return 0.0
        begin_s = time.monotonic()
        with self._run.attached.session.resting():
            coordinator.meet(
                f"pause/{steps_done}",
                steps_done,
                give_up=lambda: self._stop_requested.is_set() or stop_step(coordinator) is not None,
            )
        return time.monotonic() - begin_s

    def wait_for_turn(self, steps_done: int) -> None:
        """Wait until this rank may do more than `steps_done` steps. Asks no other rank."""
        if self._limit.is_reached(steps_done):
            self._recorder.report_paused()
            with self._run.attached.session.resting():
                self._limit.wait_beyond(steps_done, self._stop_requested)
            self._recorder.restart_clock()

    def should_stop(self, steps_done: int) -> bool:
        """Wait until this rank may do more than `steps_done` steps, and return whether it is to do
        none. One round trip to the store.
        """
        self.wait_for_turn(steps_done)
        self.pass_on_request(steps_done)
        stops_at = stop_step(self._run.coordinator)
        if stops_at is None:
            return False
        return steps_done >= stops_at or self._run.attached.session.averages_alone

    def pass_on_request(self, steps_done: int) -> None:
        """If this rank has been asked to stop, let all ranks do so after the coming step.

        Where ranks keep step, no rank can finish that step without this one, so all of them read
        the request before the step after it.
        """
        if self._stop_requested.is_set():
            stop_at(self._run.coordinator, steps_done + 1)
