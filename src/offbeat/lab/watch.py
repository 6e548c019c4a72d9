"""Keeps the books of one rank while it trains: an event for each step, and a report a few times a second."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from offbeat.lab.attached import Attached
from offbeat.lab.meeting import Meeting
from offbeat.lab.pace import Pace
from offbeat.lab.profiles import ProfileWriter
from offbeat.lab.progress import ELAPSED_VARIABLE, Paused, Progress, Reporter
from offbeat.lab.records import Evaluation, EventWriter, Record, StepEvent
from offbeat.lab.schedule import Schedule
from offbeat.lab.tasks import Task

_REPORT_EVERY_S = 0.1


@dataclass(kw_only=True)
class Run:
    """Everything one rank trains with."""

    record: Record
    meeting: Meeting
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    attached: Attached
    schedule: Schedule
    pace: Pace
    notices: list[str] = field(default_factory=list)


class Watch:
    """Writes the event of each step and reports progress a few times a second."""

    def __init__(self, run: Run, report: Reporter) -> None:
        self._run = run
        self._report = report
        self._events = EventWriter(
            run.record.path,
            rank=run.meeting.rank,
            attempt=len(run.record.attempts) - 1,
            start_step=run.schedule.position.step if run.meeting.life else None,
        )
        self._profiles = ProfileWriter(run.record.path, rank=run.meeting.rank, attempt=len(run.record.attempts) - 1)
        self._before = self.first = run.attached.stats
        self.first_step = run.schedule.position.step
        self.seconds = 0.0
        self.num_samples = 0
        self.last_loss: float | None = None
        self._metric: float | None = None
        self._missed_s = float(os.environ.get(ELAPSED_VARIABLE) or 0)
        self._earlier_totals: tuple[float, int] | None = None
        self._since_s = self._reported_s = time.monotonic()
        self._seconds_reported, self._stats_reported, self._step_reported = 0.0, self.first, self.first_step

    @property
    def elapsed_s(self) -> float:
        """Training time of this attempt; for a worker that came back, with what it has missed."""
        return self._missed_s + self.seconds

    def step_done(self, *, loss: float, batch_size: int) -> None:
        now_s = time.monotonic()
        run, stats, before = self._run, self._run.attached.stats, self._before
        step_s, encode_s, wait_s = now_s - self._since_s, stats.encode_s - before.encode_s, stats.wait_s - before.wait_s
        self._events.add(
            StepEvent(
                step=run.schedule.position.step,
                loss=loss if math.isfinite(loss) else None,
                batch_size=batch_size,
                began_s=self._since_s,
                ready_s=run.attached.take_ready_at_s(),
                duration_s=step_s,
                compute_s=max(0.0, step_s - encode_s - wait_s),
                encode_s=encode_s,
                wait_s=wait_s,
                padded_s=run.pace.slept_s,
                bytes_sent=stats.bytes_sent - before.bytes_sent,
                messages_sent=stats.messages_sent - before.messages_sent,
                skipped=stats.skipped_steps > before.skipped_steps,
                arrivals=run.attached.take_arrivals(),
            )
        )
        if (profile := run.attached.take_profile()) is not None:
            self._profiles.add(run.schedule.position.step, profile)
        run.pace.not_compute(encode_s, wait_s)
        self.seconds += step_s
        self.num_samples += batch_size
        self._before, self.last_loss = stats, loss
        if now_s - self._reported_s >= _REPORT_EVERY_S or run.schedule.position.step >= run.schedule.target:
            self._tell(now_s)
        self.restart(now_s)

    def restart(self, since_s: float | None = None) -> None:
        """Count the next step from `since_s`, by default from now: what happened before belongs to no step."""
        self._since_s = time.monotonic() if since_s is None else since_s

    def measured(self, metric: float) -> None:
        """This rank leads and has measured the metric."""
        self._metric = metric
        earlier_s, earlier_bytes = self._earlier()
        self._events.add_evaluation(
            Evaluation(
                step=self._run.schedule.position.step,
                seconds=earlier_s + self.elapsed_s,
                bytes_sent=earlier_bytes + self._before.bytes_sent - self.first.bytes_sent,
                metric=metric,
                at_s=time.monotonic(),
                rank=self._run.meeting.rank,
            )
        )

    def paused(self) -> None:
        """This rank's turn is over."""
        self._report(Paused(rank=self._run.meeting.rank, step=self._run.schedule.position.step, seconds=self.elapsed_s))

    def close(self) -> None:
        self._events.close()

    def _earlier(self) -> tuple[float, int]:
        """Seconds and bytes of this rank's steps in earlier attempts."""
        if self._earlier_totals is None:
            record, start_step = self._run.record, self._run.record.attempts[-1].start_step
            events = [e for e in record.events(self._run.meeting.rank) if e.step <= start_step] if start_step else []
            self._earlier_totals = sum(e.duration_s for e in events), sum(e.bytes_sent for e in events)
        return self._earlier_totals

    def _tell(self, now_s: float) -> None:
        position, stats = self._run.schedule.position, self._before
        num_steps = max(1, position.step - self._step_reported)
        seconds = max(1e-9, self.seconds - self._seconds_reported)
        self._report(
            Progress(
                rank=self._run.meeting.rank,
                pid=os.getpid(),
                step=position.step,
                seconds=self.elapsed_s,
                target=self._run.schedule.target,
                loss=self.last_loss or 0.0,
                wait_share=min(1.0, (stats.wait_s - self._stats_reported.wait_s) / seconds),
                bytes_per_step=(stats.bytes_sent - self._stats_reported.bytes_sent) / num_steps,
                metric=self._metric,
            )
        )
        self._reported_s, self._seconds_reported = now_s, self.seconds
        self._stats_reported, self._step_reported = stats, position.step
