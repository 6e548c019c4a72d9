"""What one worker of the lab does: an ordinary training loop around `offbeat.attach`, and a record of it.

Run by the supervisor as `python -m offbeat.lab.worker RUN/config.json`; `train_rank` is also what the command line runs in
process under torchrun or srun. To see how offbeat is used, read `_train`; the rest keeps the books.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict, cast

import torch
from torch import nn

from offbeat.checkpoint import Manifest, Tree, latest, read_shard, write_checkpoint
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.lab.attached import Attached, InSession, Meter
from offbeat.lab.cluster import Cluster
from offbeat.lab.config import RunConfig
from offbeat.lab.gate import Gate
from offbeat.lab.native import Native
from offbeat.lab.pace import Pace
from offbeat.lab.progress import EXIT_STOPPED, TURNS_VARIABLE, Failure, Reporter, pipe_reporter
from offbeat.lab.records import Record, Summary, write_summary
from offbeat.lab.rendezvous import Meeting, join, leave
from offbeat.lab.schedule import Position, Schedule
from offbeat.lab.watch import Run, Watch
from offbeat.session import attach_through, reshard
from offbeat.transport.wrappers.delaying import Delaying, Delivery


class _State(TypedDict):
    """What a rank's part of a checkpoint holds."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]
    random: torch.Tensor


def train_rank(run_directory: Path, meeting: Meeting, report: Reporter, *, gate: Gate | None = None) -> Summary | None:
    """Train as rank `meeting.rank` what `run_directory/config.json` says, from its checkpoint if the attempt is a resume.

    Args:
        run_directory: the record.
        meeting: of this run's ranks.
        report: hears how far this rank is.
        gate: whose turn it is; None trains without pause.

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
    in_user_space = record.emulation is not None and record.emulation.kind == "delaying"
    with (
        _attach(config, meeting, model, optimizer, in_user_space=in_user_space) as attached,
        _stop_requests() as stop_requested,
    ):
        position = _restore(record, meeting, model, optimizer, attached) if start_step else Position()
        run = Run(
            record=record,
            meeting=meeting,
            task=task,
            model=model,
            optimizer=optimizer,
            attached=attached,
            schedule=Schedule(config, task, position, rank=meeting.rank, world_size=meeting.world_size),
            pace=Pace(
                config.cluster, meeting.rank, by_sleeping=record.emulation is not None and record.emulation.speeds == "sleeping"
            ),
        )
        watch = Watch(run, report)
        try:
            _train(run, watch, gate or Gate.open(), stop_requested)
        finally:
            watch.close()
        if config.checkpoint_every is not None:
            _save(run)
        final = attached.averaged_model()
    return _conclude(run, watch, final)


def _attach(
    config: RunConfig, meeting: Meeting, model: nn.Module, optimizer: torch.optim.Optimizer, *, in_user_space: bool
) -> Attached:
    """Put the run's strategy to work; `in_user_space` imitates the cluster's links there."""
    recipe = config.build_strategy()
    delay = None if config.cluster is None or not in_user_space else _link_delay(config.cluster, meeting.rank)
    if isinstance(recipe, Native):
        return recipe.attach(model, optimizer, Meter(meeting.world_size, rank=meeting.rank, delay=delay))
    wrap = (lambda driver: driver) if delay is None else (lambda driver: Delaying(driver, delay))
    return InSession(model, optimizer, attach_through(wrap, model, optimizer, recipe))


def _link_delay(cluster: Cluster, rank: int) -> Callable[[Delivery], float]:
    link = cluster.link_of(rank)
    return lambda delivery: delivery.num_messages * link.latency_s + delivery.num_bytes / link.bytes_per_s


def _train(run: Run, watch: Watch, gate: Gate, stop_requested: threading.Event) -> None:
    task, attached, schedule, pace = run.task, run.attached, run.schedule, run.pace
    config = run.record.config

    def should_stop(steps_done: int) -> bool:
        if gate.closed(steps_done):
            watch.paused()
            gate.wait(steps_done, stop_requested)
            watch.restart()
        if stop_requested.is_set():
            # Nobody can finish the coming step without this rank, so all ranks read this before the step after it.
            run.meeting.stop_at(steps_done + 1)
        agreed = run.meeting.stop_step()
        return agreed is not None and steps_done >= agreed

    if config.eval_every is not None and schedule.position.step == 0:
        _evaluate(run, watch)
    for batch in schedule.batches(should_stop):
        pace.begin(schedule.position.step + 1)
        loss = task.loss(attached.module, batch)
        pace.before_backward(watch.seconds)
        with pace.backward():
            attached.backward(loss)
        attached.optimizer.step()
        attached.optimizer.zero_grad()

        schedule.advance()
        watch.step_done(loss=loss.item(), batch_size=len(batch[0]))
        step = schedule.position.step
        if config.checkpoint_every is not None and step % config.checkpoint_every == 0:
            _save(run)
            watch.restart()
        if config.eval_every is not None and step % config.eval_every == 0 and step < schedule.target:
            _evaluate(run, watch)


def _evaluate(run: Run, watch: Watch) -> None:
    """Measure the metric on rank 0, in nobody's training time."""
    model = run.attached.averaged_model()
    if run.meeting.rank == 0:
        model.eval()
        watch.measured(run.task.evaluate(model))
        model.train()
    run.meeting.barrier()
    watch.restart()


def _save(run: Run) -> None:
    tree = _State(
        model=run.model.state_dict(),
        optimizer=run.optimizer.state_dict(),
        session=run.attached.state_dict(),
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
    record: Record, meeting: Meeting, model: nn.Module, optimizer: torch.optim.Optimizer, attached: Attached
) -> Position:
    manifest, start_step = latest(record.checkpoint_root), record.attempts[-1].start_step
    if manifest.step != start_step:
        raise CheckpointError(
            f"the checkpoint is of step {manifest.step}, the run was to go on from step {start_step}; start it again"
        )
    tree = _shard(manifest, meeting.rank % manifest.world_size)
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    session = attached.session if isinstance(attached, InSession) else None
    if manifest.world_size == meeting.world_size:
        if session is not None:
            session.load_state_dict(tree["session"])
        torch.set_rng_state(tree["random"])
    elif session is not None:
        states = [_shard(manifest, rank)["session"] for rank in range(manifest.world_size)]
        session.load_state_dict(reshard(states, meeting.world_size, meeting.rank))
    return Position.from_json(manifest.metadata.get("position"))


def _shard(manifest: Manifest, rank: int) -> _State:
    tree = read_shard(manifest, rank)
    if not isinstance(tree, dict) or tree.keys() != _State.__annotations__.keys():
        raise CheckpointError(f"{manifest.path} was not written by offbeat train; use a checkpoint of this run")
    return cast(_State, tree)


def _conclude(run: Run, watch: Watch, final: nn.Module) -> Summary | None:
    """Compare the replicas, measure the `final` model on rank 0, and write the summary."""
    config, step, last = run.record.config, run.schedule.position.step, run.attached.stats
    num_steps = max(1, step - watch.first_step)
    mine = {
        "digest": digest(run.model),
        "bytes_per_step": (last.bytes_sent - watch.first.bytes_sent) / num_steps,
        "messages_per_step": (last.messages_sent - watch.first.messages_sent) / num_steps,
        "num_samples": watch.num_samples,
        "peak_memory_bytes": _peak_memory_bytes(),
        "notices": [*run.attached.notices, *_pace_notices(run, num_steps), *_replica_notices(run, final)],
    }
    ends = [json.loads(text) for text in run.meeting.share("end", json.dumps(mine))]
    if run.meeting.rank != 0:
        return None
    stopped = step < run.schedule.target
    metric = None
    if not stopped:
        final.eval()
        metric = run.task.evaluate(final)
        watch.measured(metric)
    summary = Summary(
        status="stopped" if stopped else "finished",
        task=config.task,
        strategy=config.strategy,
        workers=config.workers,
        world_size=run.meeting.world_size,
        steps=step,
        metric=metric,
        metric_name=run.task.metric_name,
        higher_is_better=run.task.higher_is_better,
        loss=watch.last_loss,
        seconds=watch.seconds,
        steps_per_s=(step - watch.first_step) / watch.seconds if watch.seconds else 0.0,
        samples_per_s=sum(end["num_samples"] for end in ends) / watch.seconds if watch.seconds else 0.0,
        bytes_sent_per_step=sum(end["bytes_per_step"] for end in ends) / len(ends),
        messages_sent_per_step=sum(end["messages_per_step"] for end in ends) / len(ends),
        peak_memory_bytes=[end["peak_memory_bytes"] for end in ends],
        skipped_steps=last.skipped_steps - watch.first.skipped_steps,
        num_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        parameters_sha256=digest(final),
        replicas_identical=len({end["digest"] for end in ends}) == 1,
        resumed_from_step=watch.first_step or None,
        notices=list(dict.fromkeys(notice for end in ends for notice in end["notices"])),
        run_directory=str(run.record.path),
    )
    write_summary(summary)
    return summary


def _replica_notices(run: Run, final: nn.Module) -> list[str]:
    return [] if final is run.model else ["the workers' models differ on purpose; the metric is that of their mean"]


def _pace_notices(run: Run, num_steps: int) -> list[str]:
    if run.pace.num_late * 20 < num_steps:
        return []
    what = f"worker {run.meeting.rank} computed for longer than the emulated step in {run.pace.num_late} of {num_steps} steps"
    return [f"{what}; give a longer --step-time, or fewer workers"]


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


def _listen_to_supervisor(gate: Gate) -> None:
    """Obey lines on standard input; die when it closes: the supervisor holds its other end, and may have been killed."""

    def listen() -> None:
        for line in sys.stdin:
            gate.move(int(line))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, name="supervisor-watch", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of a supervised worker; returns its exit status."""
    (config_path,) = sys.argv[1:] if arguments is None else arguments
    gate = Gate(0) if TURNS_VARIABLE in os.environ else Gate.open()
    _listen_to_supervisor(gate)
    report = pipe_reporter()
    meeting: Meeting | None = None
    try:
        meeting = join()
        summary = train_rank(Path(config_path).parent, meeting, report, gate=gate)
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
