"""One worker of the lab: it trains a task, or runs a user's script as `offbeat run` does.

Run by the supervisor as `python -m offbeat_lab.worker RUN/config.json`, or forked from
`offbeat_lab.worker_server`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import torch
from typing_extensions import override

from offbeat.codec.jit import keep_freed_memory
from offbeat.run.config import RunConfig
from offbeat.run.coordination import Coordinator
from offbeat.run.progress import EXIT_STOPPED, Failure, Reporter, pipe_reporter
from offbeat.run.recipes import ScriptRecipe
from offbeat.run.recording import REPORT_EVERY_S, OpenRecord, ScriptRecorder
from offbeat.run.step_recorder import RankRun, StepRecorder
from offbeat.run.worker import listen_to_supervisor, run_supervised
from offbeat.strategies.registry import ALONE
from offbeat_lab.attaching import imitated_link, script_recipe, step_time
from offbeat_lab.config import recipe_of
from offbeat_lab.joining import join, leave
from offbeat_lab.pauses import TURNS_VARIABLE, EmulatedRecorder, Pauses, StepLimit
from offbeat_lab.records import Record
from offbeat_lab.training import step_time_notices, train_rank

PATIENCE_S: Final = 10.0
"""For how long the leader waits for ranks that are behind: one may have left its loop."""

_LOOK_EVERY_S: Final = 2e-3
_never: Final = threading.Event()


@dataclass
class EvaluationPause:
    """Lets no rank of a script that is compared train on while the leader evaluates; one rank's
    side.

    Where ranks do not keep step, the others would go on meanwhile, and what the leader measures,
    and all that follows, would have had more training than its steps and seconds say.

        the leader evaluates after step n      waits for those that have not done n steps
        the others                             do n steps, and begin none after them
        the leader begins step n + 1           and so do the others

    A rank that was further than n stays so: nobody knew before that there would be an evaluation.
    It pauses where a step begins and not where one ends, since a script may evaluate on all ranks
    together.

    Args:
        coordinator: of this run's ranks.
        inform: is told, once, that the leader has evaluated although ranks were behind.
        patience_s: for how long the leader waits for others.

    Attributes:
        is_evaluating: whether this rank leads and evaluates.
    """

    coordinator: Coordinator
    inform: Callable[[str], None]
    patience_s: float = PATIENCE_S
    is_evaluating: bool = False
    _was_told: bool = False

    def step_done(self, step: int, seconds: float) -> None:
        """This rank has done `step` steps in `seconds` seconds of training."""
        self.coordinator.publish(f"progress/{self.coordinator.rank}", json.dumps([step, seconds]))

    def begin(self, step: int, seconds: float) -> float:
        """This rank leads, and evaluates after `step` steps and `seconds` seconds of training.

        Returns:
            The training time in which all living ranks have done as many steps.
        """
        coordinator = self.coordinator
        self.is_evaluating = True
        coordinator.publish("evaluating", json.dumps([coordinator.rank, step]))
        polls = int(self.patience_s / _LOOK_EVERY_S)
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
            self.inform(
                f"what was measured after {step} steps is of a model with fewer: of"
                f" {', '.join(behind)} after {self.patience_s:g} s of waiting; let all workers do"
                " equally many steps"
            )
        return seconds

    def end(self) -> None:
        """This rank goes on training, or has come to its end."""
        if self.is_evaluating:
            self.is_evaluating = False
            self.coordinator.publish("evaluating", "")

    def wait(self, steps_done: int) -> None:
        """Return when this rank, which has done `steps_done` steps, may begin another one."""
        while text := self.coordinator.published("evaluating"):
            leader, step = json.loads(text)
            if steps_done < step or self.coordinator.leader != leader:
                return  # a leader that has died does not evaluate any more
            _never.wait(_LOOK_EVERY_S)

    def _progress(self, rank: int) -> tuple[int, float]:
        step, seconds = json.loads(self.coordinator.published(f"progress/{rank}") or "[0, 0.0]")
        return step, seconds


class ComparedScript(ScriptRecorder):
    """Records one rank of a script that is compared: between its steps it waits for its turn, and
    while the leader evaluates.

    Args:
        open_record, report, stop_after, patience_s: as of `ScriptRecorder`.
        turns: the steps that it may do.
    """

    def __init__(
        self,
        open_record: Callable[[], OpenRecord | None],
        report: Reporter,
        *,
        turns: StepLimit,
        stop_after: int | None,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(open_record, report, stop_after=stop_after, patience_s=patience_s)
        self._turns = turns
        self._pauses: Pauses | None = None
        self._pause: EvaluationPause | None = None
        self._backward = ExitStack()

    @override
    def loss_seen(self, loss: torch.Tensor, scale: float | torch.Tensor) -> None:
        super().loss_seen(loss, scale)
        recorder = self._recorder
        if isinstance(recorder, EmulatedRecorder):
            recorder.step_time.before_backward(recorder.elapsed_s)
            self._backward.close()
            self._backward.enter_context(recorder.step_time.backward())

    @override
    def backward_ended(self) -> None:
        self._backward.close()

    @override
    def _recorder_of(self, run: RankRun) -> EmulatedRecorder:
        longer = step_time(run.record, run.coordinator.rank)
        return EmulatedRecorder(
            run, self._report, longer, amendable=True, report_every_s=REPORT_EVERY_S
        )

    @override
    def _training_begins(self, recorder: StepRecorder) -> None:
        assert isinstance(recorder, EmulatedRecorder)
        run = recorder.run
        alone = run.attached.session.averages_alone
        # Where ranks average alone they would wait for the leader's evaluation too.
        meets = run.record.config.strategy != ALONE and not alone
        self._pauses = Pauses(run, recorder, self._turns, threading.Event(), meets=meets)
        if self._turns.ends_turns and alone:
            self._pause = EvaluationPause(run.coordinator, run.notices.append)
        self._pauses.wait_for_turn(run.schedule.position.step)

    @override
    def _step_begins(self, recorder: StepRecorder) -> None:
        assert isinstance(recorder, EmulatedRecorder)
        if self._pause is not None:
            began_s = time.monotonic()
            self._evaluation_ends()
            with recorder.run.attached.session.resting():
                self._pause.wait(recorder.run.schedule.position.step)
            recorder.leave_out(time.monotonic() - began_s)
        recorder.step_time.begin_step(recorder.run.schedule.position.step + 1)

    @override
    def _record_step(self, loss: float | None, recorder: StepRecorder) -> None:
        assert isinstance(recorder, EmulatedRecorder)
        step = self.position.step
        if self._pauses is not None:
            recorder.met_s = self._pauses.meet(step)
        super()._record_step(loss, recorder)
        if self._pause is not None:
            self._pause.step_done(step, recorder.elapsed_s)

    @override
    def step_ended(self, num_steps: int) -> None:
        super().step_ended(num_steps)
        if self._recorder is not None and self._pauses is not None:
            # It restarts the clock where it waits.
            self._pauses.wait_for_turn(self.position.step)

    @override
    def evaluates(self) -> None:
        super().evaluates()
        recorder, pause = self._recorder, self._pause
        if pause is None or pause.is_evaluating or recorder is None or not recorder.leads:
            return
        assert isinstance(recorder, EmulatedRecorder)
        with recorder.run.attached.session.resting():
            recorder.evaluated_s = pause.begin(self.position.step, recorder.elapsed_s)

    @override
    def end(self) -> None:
        self._evaluation_ends()
        if isinstance(recorder := self._recorder, EmulatedRecorder):
            rank, num_steps = recorder.run.coordinator.rank, self.position.step
            num_steps = max(1, num_steps - recorder.first_step)
            recorder.run.notices += step_time_notices(recorder.step_time, rank, num_steps)
        super().end()

    @override
    def abandon(self) -> None:
        super().abandon()
        self._evaluation_ends()

    def _evaluation_ends(self) -> None:
        """This rank trains on, or has come to its end."""
        if self._pause is not None:
            self._pause.end()
        if isinstance(self._recorder, EmulatedRecorder):
            self._recorder.evaluated_s = 0.0


def train_task(run_directory: Path, turns: StepLimit, obey: Callable[[str], None]) -> int:
    """Train the task of a record; returns the exit status."""
    listen_to_supervisor(obey)
    report = pipe_reporter()
    coordinator: Coordinator | None = None
    try:
        coordinator = join()
        summary = train_rank(run_directory, coordinator, report, limit=turns)
        leave()
    except Exception as error:  # noqa: BLE001 - the supervisor wants to know of every kind
        report(Failure.of(error, rank=coordinator.rank if coordinator else -1))
        with suppress(OSError):  # a full disk takes no log
            traceback.print_exc()
        return 1
    return 0 if summary is None or summary.status == "finished" else EXIT_STOPPED


def run_script(turns: StepLimit, obey: Callable[[str], None]) -> int:
    """Run the script of the record that the command line names; returns the exit status."""

    def recipe(config: RunConfig, opened: OpenRecord) -> ScriptRecipe:
        link = imitated_link(opened.record, opened.coordinator.rank)
        return script_recipe(recipe_of(config), link)

    return run_supervised(partial(ComparedScript, turns=turns), recipe, obey)


def main_and_exit() -> NoReturn:
    """Be a supervised worker, and end this process."""
    keep_freed_memory()  # as `attach` does, for DDP, too
    run_directory = Path(sys.argv[1]).parent
    turns = StepLimit(0) if TURNS_VARIABLE in os.environ else StepLimit.unlimited()

    def obey(line: str) -> None:
        turns.raise_to(int(line))

    if Record(run_directory).config.script is not None:
        sys.exit(run_script(turns, obey))
    status = train_task(run_directory, turns, obey)
    # Not sys.exit: after a failure, threads and groups that wait for a dead peer must not keep this
    # process alive.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main_and_exit()
