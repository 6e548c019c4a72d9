"""A worker that trains a user's script in a comparison: it takes turns with other runs, its step
times and links may be emulated, and torch's own strategies can be put into the script.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat.run.config import RunConfig
from offbeat.run.progress import Reporter
from offbeat.run.recipes import ALONE, NoExchange, ScriptRecipe, StrategyRecipe
from offbeat.run.recording import OpenRecord, ScriptRecorder
from offbeat.run.records import RunDirectory
from offbeat.run.step_recorder import StepRecorder, StepTime
from offbeat.run.worker import run_supervised
from offbeat.session.session import Adopted
from offbeat.strategies.base import Strategy
from offbeat_lab.attaching import LinkDelay, link_delay, wrap_with
from offbeat_lab.config import cluster_of, recipe_of
from offbeat_lab.emulation.step_time import StepTimeEmulator
from offbeat_lab.evaluation_pause import EvaluationPause
from offbeat_lab.native import CommunicationMeter, Native, NativeSession
from offbeat_lab.options import Recipe
from offbeat_lab.pauses import Pauses, StepLimit
from offbeat_lab.records import emulation_of


class NativeRecipe(ScriptRecipe):
    """DDP's own exchange, with one of torch's hooks.

    Args:
        native: which one.
        delay: of this rank's link, where it is imitated in user space.
    """

    ddp_exchanges = True

    def __init__(self, native: Native, delay: LinkDelay | None = None) -> None:
        super().__init__(wrap_with(delay))
        self._meters: list[CommunicationMeter] = []
        self.name = native.name
        self.ddp_options = native.ddp_options
        self._native = native
        self._delay = delay

    @override
    def attach(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> NativeSession | None:
        if optimizer is None:
            return None
        meter = CommunicationMeter(dist.get_world_size(), rank=dist.get_rank(), delay=self._delay)
        self._meters.append(meter)
        return self._native.couple(ddp, optimizer, meter)

    @override
    def backward_ended(self) -> None:
        for meter in self._meters:
            meter.backward_done()

    @override
    def strategy_for_attach(self) -> Strategy:
        raise ConfigError(
            f"{self.name} works with DistributedDataParallel only, and the script calls"
            " offbeat.attach; choose allreduce, which exchanges the same"
        )


def recipe_for(recipe: Recipe, delay: LinkDelay | None = None) -> ScriptRecipe:
    """What puts `recipe` into a script."""
    if isinstance(recipe, Strategy):
        return StrategyRecipe(recipe, wrap_with(delay))
    return StrategyRecipe(NoExchange()) if recipe.name == ALONE else NativeRecipe(recipe, delay)


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

    @override
    def _step_time(self, record: RunDirectory, rank: int) -> StepTime:
        emulation = emulation_of(record)
        by_sleeping = emulation is not None and emulation.speeds == "sleeping"
        return StepTimeEmulator(cluster_of(record.config), rank, by_sleeping=by_sleeping)

    @override
    def _training_begins(self, recorder: StepRecorder) -> None:
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
        if self._pause is not None:
            began_s = time.monotonic()
            with recorder.run.attached.session.resting():
                self._pause.wait(recorder.run.schedule.position.step)
            recorder.leave_out(time.monotonic() - began_s)

    @override
    def _meet(self, step: int) -> float:
        return 0.0 if self._pauses is None else self._pauses.meet(step)

    @override
    def _step_is_recorded(self, step: int, recorder: StepRecorder) -> None:
        if self._pause is not None:
            self._pause.step_done(step, recorder.elapsed_s)

    @override
    def _wait_for_turn(self, step: int) -> None:
        if self._pauses is not None:
            self._pauses.wait_for_turn(step)

    @override
    def _evaluation_begins(self, recorder: StepRecorder) -> float:
        if self._pause is None or self._pause.is_evaluating:
            return self._evaluated_s
        with recorder.run.attached.session.resting():
            return self._pause.begin(recorder.run.schedule.position.step, recorder.elapsed_s)

    @override
    def _evaluation_ends(self) -> None:
        super()._evaluation_ends()
        if self._pause is not None:
            self._pause.end()


def main() -> int:
    """Entry point; returns the exit status."""
    turns = StepLimit(0)

    def recipe(config: RunConfig, opened: OpenRecord) -> ScriptRecipe:
        emulation, cluster = emulation_of(opened.record), cluster_of(config)
        in_user_space = emulation is not None and emulation.kind == "delaying"
        delay = (
            link_delay(cluster, opened.coordinator.rank)
            if in_user_space and cluster is not None
            else None
        )
        return recipe_for(recipe_of(config), delay)

    return run_supervised(
        partial(ComparedScript, turns=turns), recipe, lambda line: turns.raise_to(int(line))
    )


def main_and_exit() -> NoReturn:
    """Be a supervised worker, and end this process."""
    sys.exit(main())


if __name__ == "__main__":
    main_and_exit()
