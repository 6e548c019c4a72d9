"""The training loops of the lab's worker: of ranks that have batches of their own, and of ranks
that claim them.

Between steps, or between mega-batches, a rank pauses, stops, saves and evaluates together with its
peers.
"""

from __future__ import annotations

from offbeat.megabatch.loader import DispatchLoader
from offbeat.session.session import Session
from offbeat_lab.measuring import evaluate, measure_complete
from offbeat_lab.pauses import Pauses
from offbeat_lab.saving import save
from offbeat_lab.schedule import BatchSchedule, ClaimedSchedule
from offbeat_lab.task_recorder import TaskRecorder, TaskRun
from offbeat_lab.tasks import Batch, num_samples_of


def train(run: TaskRun, recorder: TaskRecorder, pauses: Pauses) -> None:
    """Steps with batches of this rank's own."""
    schedule = run.schedule
    assert isinstance(schedule, BatchSchedule)
    _begin(run, recorder)
    for batch in schedule.batches(pauses.should_stop):
        step = schedule.position.step
        # Where ranks do not keep step, the place in the run is that of half of them.
        place = min(step + _steps_behind(run), schedule.target - 1)
        _set_learning_rate(run, (place + 0.5) / schedule.target)
        if run.record.config.batch_shares:
            run.attached.weigh(num_samples_of(batch))
        loss = _step(run, recorder, batch, step + 1)
        schedule.advance()
        met_s = pauses.meet(step + 1, clocks_stop=_clocks_stop(run, step))
        recorder.step_done(loss=loss, batch_size=num_samples_of(batch), met_s=met_s)
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
        if pauses.is_next(schedule.position.step):
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
    task, attached, step_time = run.task, run.attached, run.step_time
    step_time.begin_step(number)
    loss = task.loss(attached.module, batch)
    step_time.before_backward(
        recorder.elapsed_s, size=num_samples_of(batch) / task.options.batch_size
    )
    with step_time.backward():
        attached.backward(loss)
    if task.max_grad_norm is not None:
        attached.clip_gradients(task.max_grad_norm)
    attached.optimizer.step()
    attached.optimizer.zero_grad()
    return loss.item()


def _steps_behind(run: TaskRun) -> int:
    session = run.attached.session
    return session.steps_behind if isinstance(session, Session) else 0


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
