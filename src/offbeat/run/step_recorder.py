"""Records one rank's training: an event for each step in the record, and now and then a report to
the supervisor.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from offbeat.callbacks.callback import Decision
from offbeat.run.coordination import Coordinator
from offbeat.run.progress import ELAPSED_VARIABLE, Remark, Reporter, WorkerProgress
from offbeat.run.records import Evaluation, EventWriter, RunDirectory, StepEvent, as_measured
from offbeat.session.loggers import LiveMetrics, named_loggers
from offbeat.session.metrics import SessionObserver
from offbeat.session.session import Session, Stats
from offbeat.transport.driver import Arrival

_REPORT_EVERY_S = 0.1


class ExchangeSession(Protocol):
    """What is recorded of whatever exchanges between ranks: `offbeat.Session`, or what the lab
    compares it with.
    """

    notices: list[str]
    observers: list[SessionObserver]

    @property
    def averages_alone(self) -> bool: ...

    @property
    def decisions(self) -> Sequence[Decision]: ...

    @property
    def start_step(self) -> int: ...

    @property
    def stats(self) -> Stats: ...

    def resting(self) -> AbstractContextManager[None]: ...

    def take_arrivals(self) -> Sequence[Arrival]: ...

    def take_ready_at_s(self) -> float | None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedModel:
    """A model, and what exchanges for it.

    Attributes:
        model: the script's own.
        session: at work on it.
    """

    model: nn.Module
    session: ExchangeSession


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is, the same on every rank.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the data completed.
        num_samples: samples that all ranks together have taken from the pass under way.
    """

    step: int = 0
    epoch: int = 0
    num_samples: int = 0


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

    record: RunDirectory
    coordinator: Coordinator
    attached: AttachedModel
    schedule: RunLength
    notices: list[str] = field(default_factory=list)


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
        self.run = run
        self._report = report
        self._report_every_s = report_every_s
        self._events = EventWriter(
            run.record.path,
            rank=run.coordinator.rank,
            attempt=len(run.record.attempts) - 1,
            start_step=run.schedule.position.step if run.coordinator.restart else None,
            amendable=amendable,
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
        self._missed_s = float(os.environ.get(ELAPSED_VARIABLE) or 0)
        if run.coordinator.rank == 0 and not run.coordinator.restart:
            for notice in run.attached.session.notices:
                report(Remark(rank=0, text=notice))
        self._since_s = time.monotonic()
        # The first step is reported at once: from then on peers may go on without a worker, and
        # the supervisor has to know that when one dies soon.
        self._reported_s = -math.inf
        self._reported_survival = False
        self._seconds_reported = 0.0
        self._stats_reported, self._step_reported = self.first, self.first_step

    @property
    def leads(self) -> bool:
        """Whether this rank measures and writes for all."""
        return self.run.coordinator.leader == self.run.coordinator.rank

    @property
    def elapsed_s(self) -> float:
        """Training time of this attempt; for a worker that came back, with what it has missed."""
        return self._missed_s + self.seconds

    def begin_anew(self) -> None:
        """Another session has taken the place of the one before, and counts from 0."""
        stats, before, first = self.run.attached.session.stats, self._before, self.first
        # What is said of the whole run goes on from what the sessions before have counted.
        self.first = replace(
            stats,
            bytes_sent=stats.bytes_sent - before.bytes_sent + first.bytes_sent,
            messages_sent=stats.messages_sent - before.messages_sent + first.messages_sent,
            skipped_steps=stats.skipped_steps - before.skipped_steps + first.skipped_steps,
        )
        self._before = self._stats_reported = stats
        self._live = self._live_metrics()
        self.restart_clock()

    def step_done(self, *, loss: float | None, batch_size: int) -> None:
        """Record a step."""
        self._add(self.next_event(loss=loss, batch_size=batch_size))
        self.num_samples += batch_size
        self.last_loss = loss
        if self._live is not None:
            if loss is not None:
                self._live.loss_seen(loss)
            self._live.step_ended(self._before.steps)
        self._report_if_due()

    def logged(self, values: Mapping[str, float]) -> None:
        """`values` were measured, perhaps when the session had ended."""
        if self._live is not None:
            self._live.logged(values)

    def _add(self, event: StepEvent) -> None:
        self._events.add(event)

    def amend_loss(self, loss: float) -> None:
        """The loss of the step that was done last, where steps are amendable."""
        self.last_loss = loss
        self._events.amend_loss(loss)

    def next_event(self, *, loss: float | None, batch_size: int) -> StepEvent:
        """What has happened since the event before."""
        now_s = time.monotonic()
        run, stats, before = self.run, self.run.attached.session.stats, self._before
        step_s = now_s - self._since_s
        compute_s, encode_s, wait_s = phases(
            step_s, stats.encode_s - before.encode_s, stats.wait_s - before.wait_s
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
            padded_s=0.0,
            bytes_sent=stats.bytes_sent - before.bytes_sent,
            messages_sent=stats.messages_sent - before.messages_sent,
            skipped=stats.skipped_steps > before.skipped_steps,
            arrivals=run.attached.session.take_arrivals(),
        )
        self.seconds += step_s
        self._before = stats
        self.restart_clock(now_s)
        return event

    def step_left_out(self) -> None:
        """A scaler has left a step out: what was counted since the event before belongs to no step,
        but its time is training time.
        """
        now_s, session = time.monotonic(), self.run.attached.session
        self.seconds += now_s - self._since_s
        self._before = session.stats
        session.take_ready_at_s()
        session.take_arrivals()
        self.restart_clock(now_s)

    def _report_if_due(self) -> None:
        now_s, schedule, stats = self._since_s, self.run.schedule, self._before
        if (
            now_s - self._reported_s < self._report_every_s
            and schedule.position.step < schedule.target
            and self._survives_death == self._reported_survival
        ):
            return
        step = self._steps_done
        num_steps = max(1, step - self._step_reported)
        seconds = max(1e-9, self.seconds - self._seconds_reported)
        self._report(
            WorkerProgress(
                rank=self.run.coordinator.rank,
                pid=os.getpid(),
                step=step,
                seconds=self.elapsed_s,
                target=schedule.target,
                loss=self.last_loss or 0.0,
                wait_share=min(1.0, (stats.wait_s - self._stats_reported.wait_s) / seconds),
                bytes_per_step=(stats.bytes_sent - self._stats_reported.bytes_sent) / num_steps,
                survives_death=self._survives_death,
                metric=self._metric,
            )
        )
        self._reported_s, self._seconds_reported = now_s, self.seconds
        self._reported_survival = self._survives_death
        self._stats_reported, self._step_reported = stats, step

    @property
    def _survives_death(self) -> bool:
        """Whether the other workers go on if one dies now."""
        session = self.run.attached.session
        return isinstance(session, Session) and session.acting.survives_death

    def restart_clock(self, since_s: float | None = None) -> None:
        """Count the next step from `since_s`, by default from now: what happened before belongs to
        no step.
        """
        self._since_s = time.monotonic() if since_s is None else since_s

    def evaluation(
        self, metric: float, others: Mapping[str, float], *, without: Collection[int] = ()
    ) -> Evaluation:
        """What `write_evaluation` is to be given where this rank leads and has measured the metric,
        and whatever else the task measures. `without`: the ranks whose models the mean lacks.
        """
        earlier_s, earlier_bytes = self._earlier()
        return Evaluation(
            step=self.run.schedule.position.step,
            seconds=earlier_s + self.elapsed_s,
            bytes_sent=earlier_bytes + self._before.bytes_sent - self.first.bytes_sent,
            metric=as_measured(metric),
            at_s=time.monotonic(),
            rank=self.run.coordinator.rank,
            others={name: as_measured(value) for name, value in others.items()},
            without=sorted(without),
        )

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Add `evaluation` to the record."""
        self._metric = evaluation.metric
        self._events.add_evaluation(evaluation)

    def close(self) -> None:
        self._events.close()
        if self._live is not None:
            self._live.closed(None)

    def _live_metrics(self) -> LiveMetrics | None:
        """What tells loggers how the present session is doing; None where nobody asked."""
        session = self.run.attached.session
        if not self._loggers or not isinstance(session, Session):
            return None
        return LiveMetrics(session, self._loggers, steps_before=self.run.schedule.position.step)

    def _earlier(self) -> tuple[float, int]:
        """Seconds and bytes of this rank's steps in earlier attempts, where a run is resumed."""
        return 0.0, 0

    @property
    def _steps_done(self) -> int:
        return self.run.schedule.position.step
