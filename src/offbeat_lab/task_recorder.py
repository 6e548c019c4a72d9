"""Records one rank's training of a task, and measures the metric while training goes on. Where
ranks claim samples, steps are written down when they are merged.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from typing_extensions import override

from offbeat.codec.tensor_bytes import to_bytes
from offbeat.megabatch.claims import MegaBatchShare
from offbeat.run.progress import Reporter
from offbeat.run.records import Evaluation, StepEvent
from offbeat.run.step_recorder import RankRun
from offbeat_lab.attaching import TaskModel
from offbeat_lab.breakdown import combine_events
from offbeat_lab.emulation.delaying import StepTimeEmulator
from offbeat_lab.pauses import EmulatedRecorder
from offbeat_lab.records import MegaBatch, Record, Share, add_mega_batch
from offbeat_lab.schedule import BatchSchedule, ClaimedSchedule
from offbeat_lab.tasks import Task


@dataclass(kw_only=True)
class TaskRun(RankRun):
    """Everything one rank trains a task with.

    Attributes:
        keeps_models: whether a rank that averages alone keeps its model in steps that are to be
            measured.
        measures_at_end: whether these are measured when all ranks have finished, and not before.
        kept: of which steps it has kept its model, and what each evaluation will say but for the
            metric.
    """

    record: Record
    attached: TaskModel
    task: Task
    step_time: StepTimeEmulator
    schedule: BatchSchedule | ClaimedSchedule
    keeps_models: bool = False
    measures_at_end: bool = False
    kept: list[Evaluation] = field(default_factory=list)


class TaskRecorder(EmulatedRecorder):
    """Writes the event of each step, and what each rank did in a mega-batch.

    Args:
        run, report: as of `StepRecorder`.
    """

    run: TaskRun

    def __init__(self, run: TaskRun, report: Reporter) -> None:
        self._unmerged: list[StepEvent] = []
        self._merged_s = 0.0
        self._in_merge: MegaBatch | None = None
        self._earlier_totals: tuple[float, int] | None = None
        super().__init__(run, report, run.step_time)

    @override
    def _earlier(self) -> tuple[float, int]:
        if self._earlier_totals is None:
            record, start_step = self.run.record, self.run.record.attempts[-1].start_step
            rank = self.run.coordinator.rank
            events = [e for e in record.events(rank) if e.step <= start_step] if start_step else []
            self._earlier_totals = (
                sum(e.duration_s for e in events),
                sum(e.bytes_sent for e in events),
            )
        return self._earlier_totals

    @override
    def _add(self, event: StepEvent) -> None:
        if isinstance(self.run.schedule, ClaimedSchedule):
            self._unmerged.append(event)
        else:
            super()._add(event)

    @property
    @override
    def _steps_done(self) -> int:
        step, schedule = super()._steps_done, self.run.schedule
        if isinstance(schedule, ClaimedSchedule) and self._unmerged:
            # The last step is done when it is merged.
            return max(step, min(step + len(self._unmerged), schedule.step_of_next_merge - 1))
        return step

    def merged(
        self, works: Sequence[MegaBatchShare] | None, *, number: int, epoch: int, first_step: int
    ) -> None:
        """A mega-batch is merged, or is being merged, and the schedule has moved on.

        Args:
            works: of all ranks that live; None: the merge is under way, and `merge_over` says.
            number, epoch: of the mega-batch.
            first_step: the first of the steps that it came to.
        """
        # Of a merge nothing is slept.
        merge = super(EmulatedRecorder, self).next_event(loss=self.last_loss, batch_size=0)
        # What was waited for belongs to the last batch, as it does elsewhere.
        events = [
            *self._unmerged[:-1],
            *(combine_events(batch, merge) for batch in self._unmerged[-1:]),
        ] or [merge]
        num_steps = self.run.schedule.position.step - first_step + 1
        for place, event in enumerate(events, start=1):
            self._events.add(
                replace(event, step=first_step - 1 + -(-place * num_steps // len(events)))
            )
        if self.leads:
            # What the trainer does for a merge beside training, it does between its steps.
            beside_s = sum(event.encode_s for event in self._unmerged) if works is None else 0.0
            mega_batch = MegaBatch(
                number=number,
                epoch=epoch,
                step=self.run.schedule.position.step,
                seconds=self._earlier()[0] + self.elapsed_s,
                at_s=self._since_s,
                duration_s=self.seconds - self._merged_s,
                merge_s=merge.duration_s + beside_s,
                by_rank=(),
            )
            if works is None:
                self._in_merge = mega_batch
            else:
                self._add_mega_batch(mega_batch, works, waits=True)
        self._unmerged, self._merged_s = [], self.seconds
        self._report_if_due()

    def merge_over(self, works: Sequence[MegaBatchShare]) -> None:
        """The merge that was under way is over, if any was.

        Args:
            works: of all ranks that live.
        """
        if self._in_merge is not None:
            mega_batch, self._in_merge = self._in_merge, None
            self._add_mega_batch(mega_batch, works, waits=False)

    def _add_mega_batch(
        self, mega_batch: MegaBatch, works: Sequence[MegaBatchShare], *, waits: bool
    ) -> None:
        """Record what all ranks did in a mega-batch.

        Args:
            mega_batch: without that; its `merge_s` says how long ago this rank came to its end.
            works: of all ranks that live.
            waits: whether the ranks waited for the slowest one.
        """
        longest_s = max(work.busy_s for work in works)
        shares = [
            Share(
                rank=work.rank,
                batch_size=work.batch_size,
                updates=work.updates,
                samples=work.samples,
                weight=work.weight,
                computing_s=work.busy_s,
                idle_s=longest_s - work.busy_s if waits else 0.0,
                claims=[[(begin, end) for begin, end in claim.spans] for claim in work.claims],
            )
            for work in works
        ]
        own_idle_s = next(
            (share.idle_s for share in shares if share.rank == self.run.coordinator.rank), 0.0
        )
        merge_s = max(0.0, mega_batch.merge_s - own_idle_s)
        add_mega_batch(self.run.record.path, replace(mega_batch, merge_s=merge_s, by_rank=shares))


_KEPT_ELEMENTS = 64 * 2**20
"""So many elements of kept models at most of each rank, 256 MiB where they are float32. Where they
would be more, the leader measures at once.
"""

_SECONDS = "seconds"


def keeps_models(num_parameters: int, steps: int, eval_every: int | None) -> bool:
    """Whether a rank can keep what is to be measured of a run that averages alone."""
    return eval_every is not None and steps // eval_every * num_parameters <= _KEPT_ELEMENTS


def evaluate(run: TaskRun, recorder: TaskRecorder) -> None:
    """Measure the metric on the leader; no rank's training time counts it. Where the leader can
    average alone, no other rank waits for it. Where models are kept, it is measured later.

    Where the leader averages alone, its peers train on while it fetches their models and measures,
    so what it measures had more steps than it says. So each rank keeps a copy of its own model in
    the steps that are to be measured, and the leader measures their mean: after equally many steps
    of each rank, in the training time that the last of them took for these.

    A leader that measures in the middle of a run is late by that, and has its last steps to itself
    when its peers have finished. So where strategies are compared it measures when all have
    finished, and nobody does more for a measurement than copy. A single run is to be watched, and
    is measured as soon as all copies are there.
    """
    apart = run.attached.session.averages_alone
    if apart and run.keeps_models:
        _keep(run, recorder)
    else:
        _measure_at_once(run, recorder, apart=apart)
    recorder.restart_clock()


def measure_complete(run: TaskRun, recorder: TaskRecorder) -> None:
    """Measure, as the leader, what has been kept of those steps that all ranks have done."""
    while run.kept:
        at = run.kept[0]
        if _is_kept(run, at):
            if _missing(run, at.step) or run.coordinator.leader != run.coordinator.rank:
                return
            _measure_kept(run, recorder, at)
            recorder.restart_clock()
        run.kept.pop(0)


def measure_rest(run: TaskRun, recorder: TaskRecorder) -> None:
    """Measure, as the leader, all that has been kept and not measured; all ranks have finished."""
    for at in run.kept:
        if _is_kept(run, at):
            _measure_kept(run, recorder, at)
    shutil.rmtree(_directory(run).parent, ignore_errors=True)


def mean_of(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of floating-point tensors, the maximum of others, by name."""
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return {
        name: each.mean(dim=0) if each.is_floating_point() else each.amax(dim=0)
        for name, each in stacked.items()
    }


def _keep(run: TaskRun, recorder: TaskRecorder) -> None:
    """Write this rank's model where the leader finds it."""
    at = recorder.evaluation(math.nan, {})
    path = _path(run, at.step, run.coordinator.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(to_bytes(run.attached.model.state_dict(), {_SECONDS: repr(at.seconds)}))
    draft.replace(path)  # the leader takes what is there to be whole
    run.kept.append(at)


def _measure_kept(run: TaskRun, recorder: TaskRecorder, at: Evaluation) -> None:
    """Measure the mean of what ranks have kept of a step, and remove that."""
    missing = _missing(run, at.step)
    paths = [_path(run, at.step, rank) for rank in range(run.coordinator.world_size)]
    there = [path for path in paths if path.exists()]
    states, seconds = [], []
    for path in there:
        with safe_open(path, "pt") as kept:
            states.append({name: kept.get_tensor(name) for name in kept.keys()})  # noqa: SIM118
            seconds.append(float(kept.metadata()[_SECONDS]))
    model = copy.deepcopy(run.attached.model)
    model.load_state_dict(mean_of(states))
    metric, others = _metrics(run, recorder, model)
    recorder.write_evaluation(
        replace(at, metric=metric, others=others, without=missing, seconds=max(seconds))
    )
    for path in there:
        path.unlink()


def _measure_at_once(run: TaskRun, recorder: TaskRecorder, *, apart: bool) -> None:
    coordinator, step = run.coordinator, run.schedule.position.step
    # A leader before this one may have been ahead.
    leads = coordinator.leader == coordinator.rank and step > int(
        coordinator.published("measured") or -1
    )
    if leads or not apart:
        # Before the first step all ranks hold the same model, and where the leader averages alone
        # its peers have none to send yet.
        model = run.attached.model if apart and not step else run.attached.averaged_model()
        if leads:
            metric, others = _metrics(run, recorder, model)
            without = run.attached.session.averaged_without
            recorder.write_evaluation(recorder.evaluation(metric, others, without=without))
            model.train()
            coordinator.publish("measured", str(step))
    if not apart:
        coordinator.gather_living(f"measured/{step}", "", step=step)


def _metrics(
    run: TaskRun, recorder: TaskRecorder, model: torch.nn.Module
) -> tuple[float, dict[str, float]]:
    """The metric of `model`, and whatever else the task measures."""
    model.eval()
    with run.attached.session.resting():
        metrics = run.task.metrics(model)
    recorder.logged(dict(metrics))
    return metrics.pop(run.task.metric_name), metrics


def _is_kept(run: TaskRun, at: Evaluation) -> bool:
    """Whether nobody has measured what this rank has kept. An earlier leader may have."""
    return _path(run, at.step, run.coordinator.rank).exists()


def _missing(run: TaskRun, step: int) -> list[int]:
    """The living ranks that have kept nothing of `step`."""
    return [
        rank
        for rank in range(run.coordinator.world_size)
        if not _path(run, step, rank).exists() and run.coordinator.is_alive(rank, step)
    ]


def _directory(run: TaskRun) -> Path:
    # What an attempt that was killed has left is of steps that are done again.
    return run.record.path / "kept" / f"attempt-{len(run.record.attempts)}"


def _path(run: TaskRun, step: int, rank: int) -> Path:
    return _directory(run) / f"step-{step}-rank-{rank}.safetensors"
