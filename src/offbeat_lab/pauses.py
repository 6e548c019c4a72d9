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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

from typing_extensions import override

from offbeat.errors import PeerError
from offbeat.run.coordination import Coordinator
from offbeat.run.progress import Paused, Reporter
from offbeat.run.records import Evaluation, StepEvent
from offbeat.run.step_recorder import RankRun, StepRecorder, phases
from offbeat_lab.emulation.delaying import StepTimeEmulator

TURNS_VARIABLE: Final = "OFFBEAT_TURNS"
"""Environment variable that is set where a worker trains only up to the step that its standard
input names.
"""

_POLL_S = 0.2
_LEAST_LOOK_S, _MOST_LOOK_S = 2e-4, 0.02
_never: Final = threading.Event()
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


class EmulatedRecorder(StepRecorder):
    """Writes the events of a rank whose steps are made longer, and which takes turns.

    Args:
        run, report, options: as of `StepRecorder`.
        step_time: what makes its steps longer.

    Attributes:
        step_time: that.
        met_s: the last part of the step that is recorded next, in which this rank waited for the
            others before clocks stop.
        evaluated_s: the training time of what is being evaluated, where the leader has waited for
            the others; else 0.
    """

    def __init__(
        self, run: RankRun, report: Reporter, step_time: StepTimeEmulator, **options: Any
    ) -> None:
        super().__init__(run, report, **options)
        self.step_time, self.met_s, self.evaluated_s = step_time, 0.0, 0.0

    @override
    def evaluation(
        self, metric: float, others: Mapping[str, float], *, without: Collection[int] = ()
    ) -> Evaluation:
        found = super().evaluation(metric, others, without=without)
        return replace(found, seconds=max(found.seconds, self.evaluated_s))

    @override
    def next_event(self, *, loss: float | None, batch_size: int) -> StepEvent:
        event, met_s = super().next_event(loss=loss, batch_size=batch_size), self.met_s
        compute_s, encode_s, wait_s = phases(event.duration_s, event.encode_s, event.wait_s + met_s)
        self.step_time.exclude_overhead(encode_s, max(0.0, wait_s - met_s))
        return replace(
            event,
            compute_s=compute_s,
            encode_s=encode_s,
            wait_s=wait_s,
            padded_s=self.step_time.slept_s,
        )

    def leave_out(self, seconds: float) -> None:
        """So many seconds since the clock was last started belong to no step."""
        self.restart_clock(self._since_s + seconds)

    def report_paused(self) -> None:
        """This rank waits until it may do more steps."""
        self._report(
            Paused(
                rank=self.run.coordinator.rank,
                step=self.run.schedule.position.step,
                seconds=self.elapsed_s,
                met_s=self.met_s,
                survives_death=self._survives_death,
            )
        )


def barrier(
    coordinator: Coordinator, name: str, ranks: Sequence[int], *, patience_s: float | None = None
) -> None:
    """Return once all of `ranks`, this one among them, are here. A name serves once.

    Raises:
        PeerError: one of them has died before it came, or is not here after `patience_s` seconds.
    """
    coordinator.publish(f"{name}/{coordinator.rank}", "here")
    until_s = None if patience_s is None else time.monotonic() + patience_s
    for rank in ranks:
        if coordinator.text_of(name, rank, None, until_s) is None:
            raise PeerError(
                f"worker {rank} did not come to {name!r}: it is dead, or hangs", rank=rank
            )


@dataclass(frozen=True)
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

    run: RankRun
    recorder: EmulatedRecorder
    limit: StepLimit
    stop_requested: threading.Event
    _: KW_ONLY
    meets: bool

    def meet(self, steps_done: int, *, clocks_stop: bool = False) -> float:
        """Wait for the other ranks where clocks stop after `steps_done` steps and the run goes on:
        at the end of a turn, and where `clocks_stop` says so. Return for how many seconds, which
        are this run's.
        """
        coordinator = self.run.coordinator
        clocks_stop |= self.limit.ends_turns and self.limit.is_reached(steps_done)
        if not (self.meets and clocks_stop) or steps_done >= self.run.schedule.target:
            return 0.0
        begin_s, name = time.monotonic(), f"pause/{steps_done}"
        with self.run.attached.session.resting():
            coordinator.publish(f"{name}/{coordinator.rank}", "here")
            for rank in range(coordinator.world_size):
                pause_s = _LEAST_LOOK_S
                # In this order: what a dead rank has not said by now it will never say.
                while (
                    coordinator.is_alive(rank, steps_done)
                    and coordinator.published(f"{name}/{rank}") is None
                    and not coordinator.has_taken_last_step(rank)
                    and not self.stop_requested.is_set()
                    and stop_step(coordinator) is None
                ):
                    _never.wait(pause_s)
                    pause_s = min(2 * pause_s, _MOST_LOOK_S)
        return time.monotonic() - begin_s

    def wait_for_turn(self, steps_done: int) -> None:
        """Wait until this rank may do more than `steps_done` steps. Asks no other rank."""
        if self.limit.is_reached(steps_done):
            self.recorder.report_paused()
            with self.run.attached.session.resting():
                self.limit.wait_beyond(steps_done, self.stop_requested)
            self.recorder.restart_clock()

    def should_stop(self, steps_done: int) -> bool:
        """Wait until this rank may do more than `steps_done` steps, and return whether it is to do
        none. One round trip to the store.
        """
        self.wait_for_turn(steps_done)
        self.pass_on_request(steps_done)
        stops_at = stop_step(self.run.coordinator)
        if stops_at is None:
            return False
        return steps_done >= stops_at or self.run.attached.session.averages_alone

    def pass_on_request(self, steps_done: int) -> None:
        """If this rank has been asked to stop, let all ranks do so after the coming step.

        Where ranks keep step, no rank can finish that step without this one, so all of them read
        the request before the step after it.
        """
        if self.stop_requested.is_set():
            stop_at(self.run.coordinator, steps_done + 1)
