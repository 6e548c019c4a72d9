"""The training loops of the lab's worker: of ranks that have batches of their own, and of ranks
that claim them.

Between steps, or between mega-batches, a rank pauses, stops, saves and evaluates together with the
others.
"""

from __future__ import annotations

import threading

from offbeat.lab.gate import Gate
from offbeat.lab.saving import save
from offbeat.lab.schedule import ClaimedSchedule, Schedule
from offbeat.lab.tasks import Batch, num_samples_of
from offbeat.lab.watch import Run, Watch
from offbeat.megabatch.loader import DispatchLoader


class Pauses:
    """What makes this rank pause, or stop for good.

    Args:
        run: this rank's.
        watch: keeps its books.
        gate: whose turn it is.
        stop_requested: set when this rank has been asked to stop.
    """

    def __init__(self, run: Run, watch: Watch, gate: Gate, stop_requested: threading.Event) -> None:
        self._run = run
        self._watch = watch
        self._gate = gate
        self._stop_requested = stop_requested

    def should_stop(self, steps_done: int) -> bool:
        """Wait until it is this run's turn to do more than `steps_done` steps. Whether not to do
        any more.
        """
        if self._gate.closed(steps_done):
            self._watch.paused()
            self._gate.wait(steps_done, self._stop_requested)
            self._watch.restart()
        self.pass_on_request(steps_done)
        agreed = self._run.meeting.stop_step()
        return agreed is not None and (
            steps_done >= agreed or self._run.attached.session.averages_alone
        )

    def pass_on_request(self, steps_done: int) -> None:
        """If this rank has been asked to stop, let all ranks do so after the coming step.

        Where ranks keep step, nobody can finish that one without this rank, so all read this before
        the one after.
        """
        if self._stop_requested.is_set():
            self._run.meeting.stop_at(steps_done + 1)


def train(run: Run, watch: Watch, pauses: Pauses) -> None:
    """Steps with batches of this rank's own."""
    schedule = run.schedule
    assert isinstance(schedule, Schedule)
    _begin(run, watch)
    for batch in schedule.batches(pauses.should_stop):
        loss = _step(run, watch, batch, schedule.position.step + 1)
        schedule.advance()
        watch.step_done(loss=loss, batch_size=num_samples_of(batch))
        _save_and_evaluate(run, watch, schedule.position.step - 1)


def train_on_claims(run: Run, watch: Watch, pauses: Pauses, loader: DispatchLoader) -> None:
    """Mega-batches, of which each rank claims what it can."""
    schedule = run.schedule
    assert isinstance(schedule, ClaimedSchedule)
    _begin(run, watch)
    while not schedule.complete and not pauses.should_stop(schedule.position.step):
        steps_before, epoch = schedule.position.step, loader.epoch
        for number, batch in enumerate(loader.one_mega_batch(), start=1):
            loss = _step(run, watch, batch, steps_before + number)
            watch.step_done(loss=loss, batch_size=num_samples_of(batch))
            pauses.pass_on_request(steps_before)
        schedule.merged(loader.epoch, loader.num_samples_merged)
        watch.merged(
            loader.last, number=loader.num_merged, epoch=epoch, first_step=steps_before + 1
        )
        _save_and_evaluate(run, watch, steps_before)


def _step(run: Run, watch: Watch, batch: Batch, number: int) -> float:
    """Step `number`, counted from 1; returns the loss."""
    task, attached, pace = run.task, run.attached, run.pace
    pace.begin(number)
    loss = task.loss(attached.module, batch)
    pace.before_backward(watch.elapsed_s, size=num_samples_of(batch) / task.options.batch_size)
    with pace.backward():
        attached.backward(loss)
    attached.optimizer.step()
    attached.optimizer.zero_grad()
    return loss.item()


def _begin(run: Run, watch: Watch) -> None:
    if run.record.config.eval_every is not None and run.schedule.position.step == 0:
        evaluate(run, watch)


def _save_and_evaluate(run: Run, watch: Watch, steps_before: int) -> None:
    """What is due when a multiple of some number of steps has been done since `steps_before`."""
    config, step = run.record.config, run.schedule.position.step
    if step >= run.schedule.target:
        return
    if (
        config.checkpoint_every is not None
        and step // config.checkpoint_every > steps_before // config.checkpoint_every
    ):
        save(run, f"step-{step}")
        watch.restart()
    if (
        config.eval_every is not None
        and step // config.eval_every > steps_before // config.eval_every
    ):
        evaluate(run, watch)


def evaluate(run: Run, watch: Watch) -> None:
    """Measure the metric on the leader, in nobody's training time. Where it averages alone, nobody
    waits for it.
    """
    meeting, step, apart = (
        run.meeting,
        run.schedule.position.step,
        run.attached.session.averages_alone,
    )
    # A leader before this one may have been ahead.
    leads = meeting.leader == meeting.rank and step > int(meeting.noted("measured") or -1)
    if leads or not apart:
        model = run.attached.averaged_model()
        if leads:
            model.eval()
            metrics = run.task.metrics(model)
            watch.measured(metrics.pop(run.task.metric_name), metrics)
            model.train()
            meeting.note("measured", str(step))
    if not apart:
        meeting.gather(f"measured/{step}", "", step=step)
    watch.restart()
