"""What one worker of the lab does: an ordinary training loop around `offbeat.attach`, and a record of it.

Run by the supervisor as `python -m offbeat.lab.worker RUN/config.json`; `train_rank` is also what the command line runs in
process under torchrun or srun. To see how offbeat is used, read `_train`; the rest keeps the books.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict, cast

import torch
from torch import nn

import offbeat
from offbeat.checkpoint import Manifest, Tree, latest, read_shard, write_checkpoint
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.lab.progress import EXIT_STOPPED, Failure, Progress, Reporter, pipe_reporter
from offbeat.lab.records import EventWriter, Record, StepEvent, Summary, write_summary
from offbeat.lab.rendezvous import Meeting, join, leave
from offbeat.lab.schedule import Position, Schedule
from offbeat.lab.tasks import Task
from offbeat.session import Session, reshard

_REPORT_EVERY_S = 0.1


class _State(TypedDict):
    """What a rank's part of a checkpoint holds."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]
    random: torch.Tensor


@dataclass(kw_only=True)
class _Run:
    """Everything one rank trains with."""

    record: Record
    meeting: Meeting
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session
    schedule: Schedule


def train_rank(run_directory: Path, meeting: Meeting, report: Reporter) -> Summary | None:
    """Train as rank `meeting.rank` what `run_directory/config.json` says, from its checkpoint if the attempt is a resume.

    Returns:
        The summary, on rank 0; it has been written too.

    Raises:
        OffbeatError: another rank failed, or the run cannot go on.
    """
    record = Record(run_directory)
    config, start_step = record.config, record.attempts[-1].start_step
    torch.set_num_threads(1)
    torch.manual_seed(config.seed * 65_537 + meeting.rank)
    task = config.build_task()
    model = task.build_model(config.seed)
    optimizer = task.optimizer(model)
    with offbeat.attach(model, optimizer, config.build_strategy()) as session, _stop_requests() as stop_requested:
        position = _restore(record, meeting, model, optimizer, session) if start_step else Position()
        schedule = Schedule(config, task, position, rank=meeting.rank, world_size=meeting.world_size)
        run = _Run(
            record=record, meeting=meeting, task=task, model=model, optimizer=optimizer, session=session, schedule=schedule
        )
        watch = _Watch(run, report)
        try:
            _train(run, watch, stop_requested)
        finally:
            watch.close()
        _save(run)
    return _conclude(run, watch)


def _train(run: _Run, watch: _Watch, stop_requested: threading.Event) -> None:
    task, model, optimizer, schedule = run.task, run.model, run.optimizer, run.schedule

    def should_stop(steps_done: int) -> bool:
        if stop_requested.is_set():
            # Nobody can finish the coming step without this rank, so all ranks read this before the step after it.
            run.meeting.stop_at(steps_done + 1)
        agreed = run.meeting.stop_step()
        return agreed is not None and steps_done >= agreed

    for batch in schedule.batches(should_stop):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        schedule.advance()
        watch.step_done(loss=loss.item(), batch_size=len(batch[0]))
        if schedule.position.step % run.record.config.checkpoint_every == 0:
            _save(run)
            watch.restart()


class _Watch:
    """Writes the event of each step and reports progress a few times a second."""

    def __init__(self, run: _Run, report: Reporter) -> None:
        self._run = run
        self._report = report
        self._events = EventWriter(run.record.path, rank=run.meeting.rank, attempt=len(run.record.attempts) - 1)
        self._before = self.first = run.session.stats
        self.first_step = run.schedule.position.step
        self.seconds = 0.0
        self.last_loss: float | None = None
        self._since_s = self._reported_s = time.perf_counter()
        self._seconds_reported, self._stats_reported, self._step_reported = 0.0, self.first, self.first_step

    def step_done(self, *, loss: float, batch_size: int) -> None:
        now_s = time.perf_counter()
        step_s, stats, before = now_s - self._since_s, self._run.session.stats, self._before
        encode_s, wait_s = stats.encode_s - before.encode_s, stats.wait_s - before.wait_s
        self._events.add(
            StepEvent(
                step=self._run.schedule.position.step,
                loss=loss if math.isfinite(loss) else None,
                batch_size=batch_size,
                compute_s=max(0.0, step_s - encode_s - wait_s),
                encode_s=encode_s,
                wait_s=wait_s,
                bytes_sent=stats.bytes_sent - before.bytes_sent,
                skipped=stats.skipped_steps > before.skipped_steps,
                arrivals=self._run.session.take_arrivals(),
            )
        )
        self.seconds += step_s
        self._before, self.last_loss = stats, loss
        if now_s - self._reported_s >= _REPORT_EVERY_S or self._run.schedule.position.step >= self._run.schedule.target:
            self._tell(now_s)
        self.restart()

    def restart(self) -> None:
        """Leave out what happened since the last step, such as a checkpoint."""
        self._since_s = time.perf_counter()

    def close(self) -> None:
        self._events.close()

    def _tell(self, now_s: float) -> None:
        position, stats = self._run.schedule.position, self._before
        num_steps = max(1, position.step - self._step_reported)
        seconds = max(1e-9, self.seconds - self._seconds_reported)
        self._report(
            Progress(
                rank=self._run.meeting.rank,
                pid=os.getpid(),
                step=position.step,
                target=self._run.schedule.target,
                loss=self.last_loss or 0.0,
                wait_share=min(1.0, (stats.wait_s - self._stats_reported.wait_s) / seconds),
                bytes_per_step=(stats.bytes_sent - self._stats_reported.bytes_sent) / num_steps,
            )
        )
        self._reported_s, self._seconds_reported = now_s, self.seconds
        self._stats_reported, self._step_reported = stats, position.step


def _save(run: _Run) -> None:
    tree = _State(
        model=run.model.state_dict(),
        optimizer=run.optimizer.state_dict(),
        session=run.session.state_dict(),
        random=torch.get_rng_state(),
    )
    write_checkpoint(
        run.record.checkpoint_root,
        cast(Tree, tree),
        step=run.schedule.position.step,
        rank=run.meeting.rank,
        world_size=run.meeting.world_size,
        barrier=run.meeting.barrier,
        metadata={"position": run.schedule.position.to_json(), "task": run.record.config.task},
    )


def _restore(
    record: Record, meeting: Meeting, model: nn.Module, optimizer: torch.optim.Optimizer, session: Session
) -> Position:
    manifest, start_step = latest(record.checkpoint_root), record.attempts[-1].start_step
    if manifest.step != start_step:
        raise CheckpointError(
            f"the checkpoint is of step {manifest.step}, the run was to go on from step {start_step}; start it again"
        )
    tree = _shard(manifest, meeting.rank % manifest.world_size)
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    if manifest.world_size == meeting.world_size:
        session.load_state_dict(tree["session"])
        torch.set_rng_state(tree["random"])
    else:
        states = [_shard(manifest, rank)["session"] for rank in range(manifest.world_size)]
        session.load_state_dict(reshard(states, meeting.world_size, meeting.rank))
    return Position.from_json(manifest.metadata.get("position"))


def _shard(manifest: Manifest, rank: int) -> _State:
    tree = read_shard(manifest, rank)
    if not isinstance(tree, dict) or tree.keys() != _State.__annotations__.keys():
        raise CheckpointError(f"{manifest.path} was not written by offbeat train; use a checkpoint of this run")
    return cast(_State, tree)


def _conclude(run: _Run, watch: _Watch) -> Summary | None:
    """Compare the replicas, measure the model on rank 0, and write the summary."""
    config, step, last = run.record.config, run.schedule.position.step, run.session.stats
    num_steps = step - watch.first_step
    bytes_per_step = (last.bytes_sent - watch.first.bytes_sent) / num_steps if num_steps else 0.0
    shared = run.meeting.share("end", json.dumps({"digest": digest(run.model), "bytes_per_step": bytes_per_step}))
    if run.meeting.rank != 0:
        return None
    ends = [json.loads(text) for text in shared]
    stopped = step < run.schedule.target
    run.model.eval()
    summary = Summary(
        status="stopped" if stopped else "finished",
        task=config.task,
        strategy=config.strategy,
        workers=config.workers,
        world_size=run.meeting.world_size,
        steps=step,
        metric=None if stopped else run.task.evaluate(run.model),
        metric_name=run.task.metric_name,
        loss=watch.last_loss,
        seconds=watch.seconds,
        steps_per_s=num_steps / watch.seconds if watch.seconds else 0.0,
        bytes_sent_per_step=sum(end["bytes_per_step"] for end in ends) / len(ends),
        skipped_steps=last.skipped_steps - watch.first.skipped_steps,
        num_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        parameters_sha256=ends[0]["digest"],
        replicas_identical=len({end["digest"] for end in ends}) == 1,
        resumed_from_step=watch.first_step or None,
        notices=list(run.session.notices),
        run_directory=str(run.record.path),
    )
    write_summary(summary)
    return summary


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters and buffers of `model`, by name."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, in place of ending the process."""
    requested = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        requested.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_supervisor() -> None:
    """Die when standard input closes: the supervisor holds its other end, and may itself have been killed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of a supervised worker; returns its exit status."""
    (config_path,) = sys.argv[1:] if arguments is None else arguments
    _end_with_supervisor()
    report = pipe_reporter()
    meeting: Meeting | None = None
    try:
        meeting = join()
        summary = train_rank(Path(config_path).parent, meeting, report)
        leave()
    except Exception as error:  # noqa: BLE001 - the supervisor wants to know of every kind
        message = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
        report(Failure(rank=meeting.rank if meeting else -1, kind=type(error).__name__, message=message))
        traceback.print_exc()  # after the report, since a full disk takes no log
        return 1
    return 0 if summary is None or summary.status == "finished" else EXIT_STOPPED


if __name__ == "__main__":
    # Not sys.exit: after a failure, threads and groups that wait for a dead peer must not keep this process alive.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
