"""Records one rank's training of a task. Where ranks claim samples, steps are written down when
they are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from offbeat.megabatch.claims import MegaBatchShare
from offbeat.run.records import Evaluation, StepEvent
from offbeat.run.step_recorder import RankRun, StepRecorder
from offbeat_lab.attaching import TaskModel
from offbeat_lab.breakdown import combine_events
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
    schedule: BatchSchedule | ClaimedSchedule
    keeps_models: bool = False
    measures_at_end: bool = False
    kept: list[Evaluation] = field(default_factory=list)


class TaskRecorder(StepRecorder):
    """Writes the event of each step, and what each rank did in a mega-batch.

    Args:
        run: of this rank.
        options: of `StepRecorder`.
    """

    run: TaskRun

    def __init__(self, run: TaskRun, *options: Any, **named: Any) -> None:
        self._unmerged: list[StepEvent] = []
        self._merged_s = 0.0
        self._in_merge: MegaBatch | None = None
        self._earlier_totals: tuple[float, int] | None = None
        super().__init__(run, *options, **named)

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
        merge = self._event(loss=self.last_loss, batch_size=0, padded_s=0.0)
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
