"""What one worker of the lab does: an ordinary training loop around `offbeat.attach`, and a record
of it.

Run by the supervisor as `python -m offbeat_lab.worker RUN/config.json`, or forked from
`offbeat_lab.worker_server`; `train_rank` is also what the command line runs in process under
torchrun or srun. To see how offbeat is used, read
`offbeat_lab.loop`; the rest keeps the books.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from offbeat.megabatch.loader import DispatchLoader
from offbeat.run.config import RunConfig
from offbeat.run.coordination import Coordinator
from offbeat.run.interrupts import stop_requests
from offbeat.run.progress import (
    EXIT_STOPPED,
    TURNS_VARIABLE,
    Failure,
    Joined,
    Reporter,
    pipe_reporter,
)
from offbeat.run.records import Summary
from offbeat.run.run_summary import HANGS_S
from offbeat.run.step_recorder import Position
from offbeat.session.session import Session
from offbeat_lab.attaching import TaskModel, attach_recipe
from offbeat_lab.compare_plan import ALONE
from offbeat_lab.config import cluster_of, recipe_of, task_of
from offbeat_lab.emulation.step_time import StepTimeEmulator
from offbeat_lab.joining import join, leave
from offbeat_lab.loop import train, train_on_claims
from offbeat_lab.measuring import keeps_models
from offbeat_lab.native import NativeSession
from offbeat_lab.pauses import Pauses, StepLimit
from offbeat_lab.records import Record
from offbeat_lab.saving import restore, save
from offbeat_lab.schedule import (
    BatchSchedule,
    ClaimedSchedule,
    claimed_schedule,
    position_from_json,
)
from offbeat_lab.task_recorder import TaskRecorder, TaskRun
from offbeat_lab.task_summary import summarize_run
from offbeat_lab.tasks import Batch, Task


def train_rank(
    run_directory: Path,
    coordinator: Coordinator,
    report: Reporter,
    *,
    limit: StepLimit | None = None,
) -> Summary | None:
    """Train as rank `coordinator.rank` what `run_directory/config.json` says, from its checkpoint
    if the attempt is a resume.

    Args:
        run_directory: the record.
        coordinator: of this run's ranks.
        report: hears how far this rank is.
        limit: the steps that it may do; None trains without pause.

    Returns:
        The summary, on the rank that leads; it has been written too.

    Raises:
        OffbeatError: another rank failed, or the run cannot go on.
    """
    record = Record(run_directory)
    config = record.config
    torch.set_num_threads(1)
    torch.manual_seed(config.seed * 65_537 + coordinator.rank)
    task = task_of(config)
    model = task.build_model(config.seed)
    optimizer = task.optimizer(model)
    in_user_space = record.emulation is not None and record.emulation.kind == "delaying"
    attached = attach_recipe(
        recipe_of(config),
        model,
        optimizer,
        rank=coordinator.rank,
        world_size=coordinator.world_size,
        cluster=cluster_of(config) if in_user_space else None,
    )
    stop_requested = threading.Event()
    with attached.session as session, stop_requests(lambda number: stop_requested.set()):
        loader = _loader(config, session, task)  # before what is saved of it is restored
        position = _position(record, coordinator, attached, task, loader)
        run = TaskRun(
            record=record,
            coordinator=coordinator,
            task=task,
            attached=attached,
            schedule=_schedule(config, task, position, coordinator),
            step_time=StepTimeEmulator(
                cluster_of(config),
                coordinator.rank,
                by_sleeping=record.emulation is not None and record.emulation.speeds == "sleeping",
            ),
        )
        run.keeps_models = keeps_models(
            task.num_parameters(), run.schedule.target, config.eval_every
        )
        run.measures_at_end = limit is not None and limit.ends_turns
        if coordinator.restart:
            coordinator.rejoin_at(position.step + 1)
            report(Joined(rank=coordinator.rank, step=position.step))
        recorder = TaskRecorder(run, report)
        try:
            pauses = Pauses(
                run,
                recorder,
                limit or StepLimit.unlimited(),
                stop_requested,
                meets=config.strategy != ALONE,
            )
            if loader is None:
                train(run, recorder, pauses)
            else:
                train_on_claims(run, recorder, pauses, loader)
            coordinator.take_no_more_steps()
        finally:
            recorder.close()
        session.finish()
        if config.checkpoint_every is not None:
            save(run, "end", patience_s=HANGS_S)
        return summarize_run(run, recorder)


def _position(
    record: Record,
    coordinator: Coordinator,
    attached: TaskModel,
    task: Task,
    loader: DispatchLoader | None,
) -> Position:
    """Where this rank begins: with the run, with its checkpoint, or, if it has come back, where it
    has joined its peers.
    """
    if coordinator.restart:
        began = position_from_json(json.loads(coordinator.published("origin") or "{}"))
        schedule = _schedule(record.config, task, began, coordinator)
        if isinstance(schedule, ClaimedSchedule):
            assert loader is not None
            schedule.merged(loader.epoch, loader.num_samples_merged)
            return schedule.position
        while schedule.position.step < attached.session.start_step:
            schedule.advance()
        return schedule.position
    resumes = record.attempts[-1].start_step > 0
    position = restore(record, coordinator, attached) if resumes else Position()
    coordinator.publish("origin", json.dumps(asdict(position)))
    return position


def _loader(
    config: RunConfig, session: Session | NativeSession, task: Task
) -> DispatchLoader | None:
    """Where the strategy shares samples out: what gives this rank's. None where each rank knows its
    own.
    """
    if not (isinstance(session, Session) and session.strategy.shares_samples):
        return None

    def batch(samples: list[int]) -> Batch:
        numbers = np.array(samples, dtype=np.int64)
        return task.training_batch(numbers, seed=config.seed, epoch=loader.epoch)

    loader = session.loader(
        range(task.num_samples),
        seed=config.seed,
        batch_size=task.options.batch_size,
        collate=batch,
    )
    assert isinstance(loader, DispatchLoader)
    return loader


def _schedule(
    config: RunConfig, task: Task, position: Position, coordinator: Coordinator
) -> BatchSchedule | ClaimedSchedule:
    mega_batch = recipe_of(config).samples_between_merges(task.options.batch_size)
    if mega_batch is None:
        return BatchSchedule(
            config, task, position, rank=coordinator.rank, world_size=coordinator.world_size
        )
    return claimed_schedule(config, task, position, mega_batch, coordinator.world_size)


def _listen_to_supervisor(limit: StepLimit) -> None:
    """Obey lines on standard input; die when it closes: the supervisor holds its other end, and may
    have been killed.
    """

    def listen() -> None:
        for line in sys.stdin:
            limit.raise_to(int(line))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, name="supervisor-watch", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of a supervised worker; returns its exit status."""
    (config_path,) = sys.argv[1:] if arguments is None else arguments
    limit = StepLimit(0) if TURNS_VARIABLE in os.environ else StepLimit.unlimited()
    _listen_to_supervisor(limit)
    report = pipe_reporter()
    coordinator: Coordinator | None = None
    try:
        coordinator = join()
        summary = train_rank(Path(config_path).parent, coordinator, report, limit=limit)
        leave()
    except Exception as error:  # noqa: BLE001 - the supervisor wants to know of every kind
        report(Failure.of(error, rank=coordinator.rank if coordinator else -1))
        with suppress(OSError):  # a full disk takes no log
            traceback.print_exc()
        return 1
    return 0 if summary is None or summary.status == "finished" else EXIT_STOPPED


def main_and_exit() -> NoReturn:
    """Be a supervised worker, and end this process."""
    # Not sys.exit: after a failure, threads and groups that wait for a dead peer must not keep this
    # process alive.
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main_and_exit()
