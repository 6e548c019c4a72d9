"""Records one rank's training: an event for each step in the record, and now and then a report to
the supervisor.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from offbeat.megabatch.claims import MegaBatchShare
from offbeat.run.coordination import Coordinator
from offbeat.run.progress import ELAPSED_VARIABLE, Paused, Remark, Reporter, WorkerProgress
from offbeat.run.records import Evaluation, EventWriter, MegaBatch, Record, Share, StepEvent
from offbeat.session.live_metrics import LiveMetrics
from offbeat.session.loggers import named_loggers
from offbeat.session.session import Session
from offbeat_lab.attaching import AttachedModel
from offbeat_lab.breakdown import combine_events
from offbeat_lab.emulation.step_time import StepTimeEmulator
from offbeat_lab.profiles import ProfileWriter
from offbeat_lab.schedule import BatchSchedule, ClaimedSchedule, Position
from offbeat_lab.tasks import Task

_REPORT_EVERY_S = 0.1


class RunLength(Protocol):
    """Where a run is, and where it ends."""

    @property
    def position(self) -> Position: ...

    @property
    def target(self) -> int:
        """Steps done when the run will be finished."""


@dataclass(kw_only=True)
class RankRun:
    """What is recorded of one rank's training."""

    record: Record
    coordinator: Coordinator
    attached: AttachedModel
    schedule: RunLength
    step_time: StepTimeEmulator
    notices: list[str] = field(default_factory=list)


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

    task: Task
    schedule: BatchSchedule | ClaimedSchedule
    keeps_models: bool = False
    measures_at_end: bool = False
    kept: list[Evaluation] = field(default_factory=list)


def phases(step_s: float, encode_s: float, wait_s: float) -> tuple[float, float, float]:
    """Seconds of one step for computing, encoding and waiting, which add up to `step_s`.

    Args:
        step_s: of the whole step.
        encode_s, wait_s: what was counted since the step before. A wait within encoding is counted
            as both, and here as a wait; what a rank waited between two steps is in neither of them.
    """
    wait_s = min(wait_s, step_s)
    encode_s = min(encode_s, step_s - wait_s)
    return step_s - wait_s - encode_s, encode_s, wait_s


class StepRecorder:
    """Writes the event of each step and reports progress a few times a second."""

    def __init__(
        self,
        run: RankRun,
        report: Reporter,
        *,
        amendable: bool = False,
        report_every_s: float = _REPORT_EVERY_S,
    ) -> None:
        """Begin.

        Args:
            run: of this rank.
            report: hears how far it is.
            amendable: whether the loss of a step may be said after it, by `amend_loss`.
            report_every_s: from one report to the next, >= 0. Each wakes the supervisor.
        """
        self._run = run
        self._report = report
        self._report_every_s = report_every_s
        self._events = EventWriter(
            run.record.path,
            rank=run.coordinator.rank,
            attempt=len(run.record.attempts) - 1,
            start_step=run.schedule.position.step if run.coordinator.incarnation else None,
            amendable=amendable,
        )
        self._profiles = ProfileWriter(
            run.record.path, rank=run.coordinator.rank, attempt=len(run.record.attempts) - 1
        )
        self._before = self.first = run.attached.session.stats
        self.first_step = run.schedule.position.step
        names = run.record.config.log_to if run.coordinator.rank == 0 else []
        # One set for all sessions of the run: to W&B and MLflow they are one run.
        self._loggers = named_loggers(names, run.record.path)
        self._live = self._live_metrics()
        self.seconds = 0.0
        self.num_samples = 0
        self.last_loss: float | None = None
        self._metric: float | None = None
        self._unmerged: list[StepEvent] = []
        self._merged_s = 0.0
        self._met_s = 0.0
        self._in_merge: MegaBatch | None = None
        self._missed_s = float(os.environ.get(ELAPSED_VARIABLE) or 0)
        self._earlier_totals: tuple[float, int] | None = None
        if run.coordinator.rank == 0 and not run.coordinator.incarnation:
            for notice in run.attached.session.notices:
                report(Remark(rank=0, text=notice))
        self._since_s = time.monotonic()
        # The first step is reported at once: from then on peers may go on without a worker, and
        # the supervisor has to know that when one dies soon.
        self._reported_s = -math.inf
        self._seconds_reported, self._stats_reported, self._step_reported = (
            0.0,
            self.first,
            self.first_step,
        )

    @property
    def elapsed_s(self) -> float:
        """Training time of this attempt; for a worker that came back, with what it has missed."""
        return self._missed_s + self.seconds

    def begin_anew(self) -> None:
        """Another session has taken the place of the one before, and counts from 0."""
        self._before = self.first = self._stats_reported = self._run.attached.session.stats
        self.first_step = self._run.schedule.position.step
        self._live = self._live_metrics()
        self.restart_clock()

    def step_done(self, *, loss: float | None, batch_size: int, met_s: float = 0.0) -> None:
        """Record a step. `met_s`: the last part of it, in which this rank waited for the others
        before clocks stop.
        """
        event = self._event(
            loss=loss, batch_size=batch_size, padded_s=self._run.step_time.slept_s, met_s=met_s
        )
        self._met_s = met_s
        self._run.step_time.exclude_overhead(event.encode_s, max(0.0, event.wait_s - met_s))
        self.num_samples += batch_size
        self.last_loss = loss
        if self._live is not None and loss is not None:
            self._live.loss_seen(loss)
        if isinstance(self._run.schedule, ClaimedSchedule):
            self._unmerged.append(event)
        else:
            self._events.add(event)
        if (profile := self._run.attached.session.take_profile()) is not None:
            self._profiles.add(event.step, profile)
        self._report_if_due()

    def amend_loss(self, loss: float) -> None:
        """The loss of the step that was done last, where steps are amendable."""
        self.last_loss = loss
        self._events.amend_loss(loss)

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
        num_steps = self._run.schedule.position.step - first_step + 1
        for place, event in enumerate(events, start=1):
            self._events.add(
                replace(event, step=first_step - 1 + -(-place * num_steps // len(events)))
            )
        if self._run.coordinator.leader == self._run.coordinator.rank:
            # What the trainer does for a merge beside training, it does between its steps.
            beside_s = sum(event.encode_s for event in self._unmerged) if works is None else 0.0
            mega_batch = MegaBatch(
                number=number,
                epoch=epoch,
                step=self._run.schedule.position.step,
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

    def _event(
        self, *, loss: float | None, batch_size: int, padded_s: float, met_s: float = 0.0
    ) -> StepEvent:
        """What has happened since the event before."""
        now_s = time.monotonic()
        run, stats, before = self._run, self._run.attached.session.stats, self._before
        step_s = now_s - self._since_s
        compute_s, encode_s, wait_s = phases(
            step_s, stats.encode_s - before.encode_s, stats.wait_s - before.wait_s + met_s
        )
        event = StepEvent(
            step=run.schedule.position.step,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            batch_size=batch_size,
            began_s=self._since_s,
            ready_s=run.attached.session.take_ready_at_s(),
            duration_s=step_s,
            compute_s=compute_s,
            encode_s=encode_s,
            wait_s=wait_s,
            padded_s=padded_s,
            bytes_sent=stats.bytes_sent - before.bytes_sent,
            messages_sent=stats.messages_sent - before.messages_sent,
            skipped=stats.skipped_steps > before.skipped_steps,
            arrivals=run.attached.session.take_arrivals(),
        )
        self.seconds += step_s
        self._before = stats
        self.restart_clock(now_s)
        return event

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
            (share.idle_s for share in shares if share.rank == self._run.coordinator.rank), 0.0
        )
        self._events.add_mega_batch(
            replace(mega_batch, merge_s=max(0.0, mega_batch.merge_s - own_idle_s), by_rank=shares)
        )

    def _report_if_due(self) -> None:
        now_s, schedule = self._since_s, self._run.schedule
        if (
            now_s - self._reported_s >= self._report_every_s
            or schedule.position.step >= schedule.target
        ):
            self._report_progress(now_s)

    def restart_clock(self, since_s: float | None = None) -> None:
        """Count the next step from `since_s`, by default from now: what happened before belongs to
        no step.
        """
        self._since_s = time.monotonic() if since_s is None else since_s

    def leave_out(self, seconds: float) -> None:
        """So many seconds since the clock was last started belong to no step."""
        self._since_s += seconds

    def add_evaluation(
        self, metric: float, others: Mapping[str, float], *, without: Collection[int] = ()
    ) -> None:
        """This rank leads and has measured the metric, and whatever else the task measures.
        `without`: the ranks whose models the measured mean lacks.
        """
        self.write_evaluation(self.evaluation(metric, others, without=without))

    def evaluation(
        self, metric: float, others: Mapping[str, float], *, without: Collection[int] = ()
    ) -> Evaluation:
        """What `add_evaluation` writes, for `write_evaluation` later."""
        earlier_s, earlier_bytes = self._earlier()
        return Evaluation(
            step=self._run.schedule.position.step,
            seconds=earlier_s + self.elapsed_s,
            bytes_sent=earlier_bytes + self._before.bytes_sent - self.first.bytes_sent,
            metric=metric,
            at_s=time.monotonic(),
            rank=self._run.coordinator.rank,
            others=others,
            without=sorted(without),
        )

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Add `evaluation` to the record."""
        self._metric = evaluation.metric
        self._events.add_evaluation(evaluation)

    def report_paused(self) -> None:
        """This rank waits until it may do more steps."""
        self._report(
            Paused(
                rank=self._run.coordinator.rank,
                step=self._run.schedule.position.step,
                seconds=self.elapsed_s,
                met_s=self._met_s,
            )
        )

    def close(self) -> None:
        self._events.close()
        if self._live is not None:
            self._live.end()

    def _live_metrics(self) -> LiveMetrics | None:
        """What tells loggers how the present session is doing; None where nobody asked."""
        session = self._run.attached.session
        if not self._loggers or not isinstance(session, Session):
            return None
        live = LiveMetrics(
            session,
            self._loggers,
            steps_before=self._run.schedule.position.step,
            ends_with_session=False,
        )
        session.observers.append(live)
        return live

    def _earlier(self) -> tuple[float, int]:
        """Seconds and bytes of this rank's steps in earlier attempts."""
        if self._earlier_totals is None:
            record, start_step = self._run.record, self._run.record.attempts[-1].start_step
            events = (
                [e for e in record.events(self._run.coordinator.rank) if e.step <= start_step]
                if start_step
                else []
            )
            self._earlier_totals = (
                sum(e.duration_s for e in events),
                sum(e.bytes_sent for e in events),
            )
        return self._earlier_totals

    def _report_progress(self, now_s: float) -> None:
        schedule, stats = self._run.schedule, self._before
        step = schedule.position.step
        if (
            isinstance(schedule, ClaimedSchedule) and self._unmerged
        ):  # the last step is done when it is merged
            step = max(step, min(step + len(self._unmerged), schedule.step_of_next_merge - 1))
        num_steps = max(1, step - self._step_reported)
        seconds = max(1e-9, self.seconds - self._seconds_reported)
        self._report(
            WorkerProgress(
                rank=self._run.coordinator.rank,
                pid=os.getpid(),
                step=step,
                seconds=self.elapsed_s,
                target=schedule.target,
                loss=self.last_loss or 0.0,
                wait_share=min(1.0, (stats.wait_s - self._stats_reported.wait_s) / seconds),
                bytes_per_step=(stats.bytes_sent - self._stats_reported.bytes_sent) / num_steps,
                metric=self._metric,
            )
        )
        self._reported_s, self._seconds_reported = now_s, self.seconds
        self._stats_reported, self._step_reported = stats, step
