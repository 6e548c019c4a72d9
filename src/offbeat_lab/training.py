"""Trains one of the lab's tasks as one rank: an ordinary loop around `offbeat.attach`.

Between steps, or between mega-batches, a rank pauses, stops, saves and evaluates together with its
peers. `train` and `train_on_claims` show how offbeat is used; the rest keeps the books.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import numpy as np
import torch

from offbeat.errors import CheckpointError, PeerError
from offbeat.megabatch.loader import DispatchLoader
from offbeat.run.config import RunConfig
from offbeat.run.coordination import Coordinator
from offbeat.run.interrupts import stop_requests
from offbeat.run.progress import Joined, Reporter
from offbeat.run.records import Summary
from offbeat.run.run_summary import HANGS_S, Measured, gather_ends, write_end
from offbeat.run.step_recorder import Position
from offbeat.session.checkpoint import Tree, naming_misfit
from offbeat.session.session import Session
from offbeat.session.state import reshard
from offbeat.strategies.registry import ALONE
from offbeat_lab.attaching import TaskModel, attach_recipe, imitated_link, step_time
from offbeat_lab.checkpoints import Manifest, latest, read_shard, write_checkpoint
from offbeat_lab.config import recipe_of, task_of
from offbeat_lab.emulation.delaying import StepTimeEmulator
from offbeat_lab.native import NativeSession
from offbeat_lab.pauses import Pauses, StepLimit, barrier
from offbeat_lab.records import Record
from offbeat_lab.schedule import BatchSchedule, ClaimedSchedule, position_from_json
from offbeat_lab.task_recorder import (
    TaskRecorder,
    TaskRun,
    evaluate,
    keeps_models,
    measure_complete,
    measure_rest,
)
from offbeat_lab.tasks import Batch, Task, num_samples_of

_TOLERATED: Final = 1.05
"""Where samples are claimed a run ends at a merge: so many times as many steps as it was to do need
no remark.
"""


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
    attached = attach_recipe(
        recipe_of(config),
        model,
        optimizer,
        world_size=coordinator.world_size,
        link=imitated_link(record, coordinator.rank),
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
            step_time=step_time(record, coordinator.rank),
        )
        run.keeps_models = keeps_models(
            task.num_parameters(), run.schedule.target, config.eval_every
        )
        run.measures_at_end = limit is not None and limit.ends_turns
        if coordinator.restart:
            coordinator.rejoin_at(position.step + 1)
            report(Joined(rank=coordinator.rank, step=position.step))
        with closing(TaskRecorder(run, report)) as recorder:
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
            session.finish()
            if config.checkpoint_every is not None:
                save(run, "end", patience_s=HANGS_S)
            return _summarize(run, recorder)


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
    rank, world_size = coordinator.rank, coordinator.world_size
    mega_batch = recipe_of(config).samples_between_merges(task.options.batch_size)
    if mega_batch is None:
        return BatchSchedule(config, task, position, rank=rank, world_size=world_size)
    return ClaimedSchedule(
        config,
        position,
        num_samples=task.num_samples,
        mega_batch=mega_batch,
        samples_per_step=world_size * task.options.batch_size,
    )


def train(run: TaskRun, recorder: TaskRecorder, pauses: Pauses) -> None:
    """Steps with batches of this rank's own."""
    schedule, session = run.schedule, run.attached.session
    assert isinstance(schedule, BatchSchedule)
    _begin(run, recorder)
    for batch in schedule.batches(pauses.should_stop):
        step = schedule.position.step
        # Where ranks do not keep step, the place in the run is that of half of them.
        place = min(step + session.steps_behind, schedule.target - 1)
        _set_learning_rate(run, (place + 0.5) / schedule.target)
        if run.record.config.batch_shares:
            assert isinstance(session, Session), "torch's strategies weigh all ranks alike"
            session.weigh(num_samples_of(batch))
        loss = _step(run, recorder, batch, step + 1)
        schedule.advance()
        recorder.met_s = pauses.meet(step + 1, clocks_stop=_clocks_stop(run, step))
        recorder.step_done(loss=loss, batch_size=num_samples_of(batch))
        _save_and_evaluate(run, recorder, schedule.position.step - 1)


def train_on_claims(
    run: TaskRun, recorder: TaskRecorder, pauses: Pauses, loader: DispatchLoader
) -> None:
    """Train on mega-batches, of which each rank claims what it can.

    Args:
        run: this rank's.
        recorder: of its steps and merges.
        pauses: may pause or stop it between mega-batches.
        loader: gives the batches that this rank claims.
    """
    schedule = run.schedule
    assert isinstance(schedule, ClaimedSchedule)
    session = run.attached.session
    assert isinstance(session, Session), "torch's strategies have no mega-batches"
    session.on_merge(lambda: recorder.merge_over(loader.last))
    _begin(run, recorder)
    while not schedule.complete and not pauses.should_stop(schedule.position.step):
        steps_before, epoch = schedule.position.step, loader.epoch
        step = schedule.step_of_next_merge
        waits = step >= schedule.target or _saves_or_evaluates(run, step, steps_before)
        for number, batch in enumerate(loader.one_mega_batch(goes_on=not waits), start=1):
            # A sample is trained on with the learning rate that it has where ranks train in step.
            _set_learning_rate(run, schedule.progress_at(loader.epoch, loader.batch_position))
            loss = _step(run, recorder, batch, steps_before + number)
            # The same on all ranks, which stand at different batches when they merge: the merge
            # compares their rates.
            _set_learning_rate(run, (steps_before + 0.5) / schedule.target)
            recorder.step_done(loss=loss, batch_size=num_samples_of(batch))
            pauses.pass_on_request(steps_before)
        schedule.merged(loader.epoch, loader.num_samples_merged)
        if pauses.limit.is_reached(schedule.position.step):
            loader.end_merge()  # It is this run's time that it takes.
        recorder.merged(
            None if loader.merge_is_under_way else loader.last,
            number=loader.num_merged,
            epoch=epoch,
            first_step=steps_before + 1,
        )
        _save_and_evaluate(run, recorder, steps_before)


def _step(run: TaskRun, recorder: TaskRecorder, batch: Batch, number: int) -> float:
    """Step `number`, counted from 1; returns the loss."""
    task, attached = run.task, run.attached
    run.step_time.begin_step(number)
    loss = task.loss(attached.module, batch)
    run.step_time.before_backward(
        recorder.elapsed_s, size=num_samples_of(batch) / task.options.batch_size
    )
    with run.step_time.backward():
        attached.backward(loss)
    if task.max_grad_norm is not None:
        attached.session.clip_grad_norm_(task.max_grad_norm)
    attached.optimizer.step()
    attached.optimizer.zero_grad()
    return loss.item()


def _set_learning_rate(run: TaskRun, progress: float) -> None:
    """That of the place in the run, which is the same on every rank and after a resume."""
    lr = run.task.lr_at(progress)
    for group in run.attached.optimizer.param_groups:
        group["lr"] = lr


def _begin(run: TaskRun, recorder: TaskRecorder) -> None:
    if run.record.config.eval_every is not None and run.schedule.position.step == 0:
        evaluate(run, recorder)


def _save_and_evaluate(run: TaskRun, recorder: TaskRecorder, steps_before: int) -> None:
    """What is due when a multiple of some number of steps has been done since `steps_before`."""
    config, step = run.record.config, run.schedule.position.step
    if step >= run.schedule.target:
        return
    if _is_due(config.checkpoint_every, step, steps_before):
        save(run, f"step-{step}")
        recorder.restart_clock()
    if _is_due(config.eval_every, step, steps_before):
        evaluate(run, recorder)
    if not run.measures_at_end:
        measure_complete(run, recorder)


def _clocks_stop(run: TaskRun, steps_before: int) -> bool:
    """Whether after the next step ranks save or evaluate, and do so together."""
    return not run.attached.session.averages_alone and _saves_or_evaluates(
        run, steps_before + 1, steps_before
    )


def _saves_or_evaluates(run: TaskRun, step: int, steps_before: int) -> bool:
    config = run.record.config
    return any(
        _is_due(every, step, steps_before) for every in (config.checkpoint_every, config.eval_every)
    )


def _is_due(every: int | None, step: int, steps_before: int) -> bool:
    return every is not None and step // every > steps_before // every


def _summarize(run: TaskRun, recorder: TaskRecorder) -> Summary | None:
    """Compare the replicas, measure the model on the leader, and write the summary. Returns it
    there.
    """
    step, session, task = run.schedule.position.step, run.attached.session, run.task
    apart = session.averages_alone
    final = None if apart else run.attached.averaged_model()
    num_steps = max(1, step - recorder.first_step)
    rank = run.coordinator.rank
    notices = [*_length_notices(run), *step_time_notices(run.step_time, rank, num_steps)]
    ends = gather_ends(recorder, notices, patience_s=HANGS_S if apart else None)
    if ends is None:
        return None
    measure_rest(run, recorder)
    if final is None:
        final = run.attached.averaged_model()
    stopped = step < run.schedule.target
    metric, others = None, {}
    if not stopped:
        final.eval()
        others = task.metrics(final)
        recorder.logged(dict(others))
        metric = others.pop(task.metric_name)
        measured_at = recorder.evaluation(metric, others, without=session.averaged_without)
        if apart:  # What is measured was there when the last rank had finished.
            measured_at = replace(measured_at, seconds=max(end["seconds"] for end in ends))
        recorder.write_evaluation(measured_at)
    measured = Measured(
        metric=metric,
        name=task.metric_name,
        higher_is_better=task.higher_is_better,
        others=others,
    )
    return write_end(recorder, ends, measured, final, finished=not stopped)


def _length_notices(run: TaskRun) -> list[str]:
    step, asked = run.schedule.position.step, run.record.config.steps
    if asked is None or step <= asked * _TOLERATED:
        return []
    return [
        f"{asked} steps were asked for, and the first merge after them came at step {step}; a"
        " smaller mega_batch comes nearer"
    ]


def step_time_notices(step_time: StepTimeEmulator, rank: int, num_steps: int) -> list[str]:
    """What is to be said where steps were longer than they were to be."""
    if step_time.num_late * 20 < num_steps:
        return []
    what = (
        f"worker {rank} computed for longer than the emulated step in {step_time.num_late} of"
        f" {num_steps} steps"
    )
    return [f"{what}; give a longer --step-time, or fewer workers"]


LATE_S: Final = 0.5
"""Where ranks do not keep step: for how long ranks wait for a late one before they write
without it.
"""

_HANGS_S: Final = 60.0
"""And after what time one that was to write is taken to hang."""


class _State(TypedDict):
    """What a rank's part of a checkpoint holds."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]
    weight: float
    random: torch.Tensor


def save(run: TaskRun, name: str, *, patience_s: float = LATE_S) -> None:
    """Write a checkpoint together with those who are there.

        ranks that come in time agree on who writes      the other ranks are too late, or dead
        each of them writes its part                     the writers are numbered anew, from 0
        the first of them writes the manifest

    Where ranks do not keep step none waits long for a late one, and one that dies while it writes
    takes the checkpoint with it; the one before stays.

    It is of the first writer's step: where ranks do not keep step, other ranks may be at another
    one.

    Args:
        run: of this rank.
        name: of the occasion, the same on all ranks.
        patience_s: how long to wait for late ones, where ranks do not keep step.
    """
    coordinator, position, session = run.coordinator, run.schedule.position, run.attached.session
    apart = session.averages_alone
    positions = coordinator.gather_living(
        f"{name}/writers",
        json.dumps(asdict(position)),
        step=position.step,
        patience_s=patience_s if apart else None,
    )
    writers = list(positions)
    of_first = position_from_json(json.loads(positions[writers[0]]))
    if coordinator.rank not in writers or (
        apart and _is_past(run.record.checkpoint_root, of_first.step)
    ):
        return
    place = {"world_size": len(writers), "rank": writers.index(coordinator.rank)}
    tree = _State(
        model=run.attached.model.state_dict(),
        optimizer=run.attached.optimizer.state_dict(),
        session=session.state_dict() | place,
        weight=session.averaging_weight,
        random=torch.get_rng_state(),
    )
    moments = iter(("written", "complete"))
    try:
        write_checkpoint(
            run.record.checkpoint_root,
            cast(Tree, tree),
            step=of_first.step,
            rank=writers.index(coordinator.rank),
            world_size=len(writers),
            barrier=lambda: barrier(
                coordinator,
                f"{name}/{next(moments)}",
                writers,
                patience_s=_HANGS_S if apart else None,
            ),
            metadata={"position": asdict(of_first), "task": run.record.config.task},
        )
    except PeerError as error:
        if not (isinstance(session, Session) and session.acting.survives_death):
            raise
        run.notices.append(f"the checkpoint of step {of_first.step} was given up: {error}")


def _is_past(root: Path, step: int) -> bool:
    """Whether a later checkpoint is there: a worker that came back may come to an occasion that it
    has been at before.
    """
    try:
        return latest(root).step > step
    except CheckpointError:
        return False


def restore(record: Record, coordinator: Coordinator, attached: TaskModel) -> Position:
    """Load what this rank needs of the newest checkpoint, and say where the run stands. Raises
    `CheckpointError`.

    With as many workers as there are parts the run goes on as if nothing had been; with another
    number each begins from the mean of all parts, if the models differ on purpose.
    """
    manifest, start_step = latest(record.checkpoint_root), record.attempts[-1].start_step
    if manifest.step != start_step:
        raise CheckpointError(
            f"the checkpoint is of step {manifest.step}, the run was to go on from step"
            f" {start_step}; start it again"
        )
    tree = _part(manifest, coordinator.rank % manifest.world_size)
    with naming_misfit(f"the checkpoint {manifest.path}"):
        _load(tree, manifest, coordinator, attached)
    return position_from_json(manifest.metadata.get("position"))


def _load(tree: _State, manifest: Manifest, coordinator: Coordinator, attached: TaskModel) -> None:
    """Load this rank's part, and of the other parts what another number of ranks needs.

    Args:
        tree: this rank's part.
        manifest: of the checkpoint.
        coordinator: knows this rank.
        attached: what is loaded into.
    """
    model = attached.model
    attached.optimizer.load_state_dict(tree["optimizer"])
    session = attached.session if isinstance(attached.session, Session) else None
    if manifest.world_size == coordinator.world_size:
        model.load_state_dict(tree["model"])
        if session is not None:
            session.load_state_dict(tree["session"])
        torch.set_rng_state(tree["random"])
        return
    parts = [_part(manifest, rank) for rank in range(manifest.world_size)]
    differ = session is not None and session.strategy.replicas_differ
    model.load_state_dict(mean_of_models(parts) if differ else tree["model"])
    if session is not None:
        session.load_state_dict(
            reshard([part["session"] for part in parts], coordinator.world_size, coordinator.rank)
        )


def mean_of_models(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The mean of the parts' models by their weights: of integers the maximum, of truth values the
    first part's.

    Sums are in float64 and rounded once. A tensor in which some part is not finite, such as a mask
    to add, is the first part's.
    """
    total = sum(part["weight"] for part in parts)
    if not total > 0:
        raise CheckpointError(
            "the parts of the checkpoint weigh nothing together, so they have no mean; resume with"
            " as many workers"
        )
    mean = {}
    for name, first in parts[0]["model"].items():
        tensors = [part["model"][name] for part in parts]
        if first.dtype == torch.bool or not all(
            bool(torch.isfinite(tensor).all()) for tensor in tensors
        ):
            mean[name] = first
        elif first.is_floating_point() or first.is_complex():
            exact = torch.complex128 if first.is_complex() else torch.float64
            terms = [
                part["weight"] / total * tensor.to(exact)
                for part, tensor in zip(parts, tensors, strict=True)
            ]
            mean[name] = torch.stack(terms).sum(dim=0).to(first.dtype)
        else:
            mean[name] = torch.stack(tensors).amax(dim=0)
    return mean


def _part(manifest: Manifest, number: int) -> _State:
    tree = read_shard(manifest, number)
    if isinstance(tree, dict):
        tree.setdefault("weight", 1.0)  # checkpoints of earlier versions say nothing of it
    if not isinstance(tree, dict) or tree.keys() != _State.__annotations__.keys():
        raise CheckpointError(
            f"{manifest.path} was not written by offbeat train; use a checkpoint of this run"
        )
    return cast(_State, tree)
