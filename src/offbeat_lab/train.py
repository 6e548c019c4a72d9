"""One training run, from what the user asked for to its summary: with workers of its own, or as one
rank of torchrun's.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.errors import ConfigError, RecordError
from offbeat.run.config import RunConfig
from offbeat.run.interrupts import interrupts
from offbeat.run.progress import Listener, NoticeListener, Remark, Report, WorkerProgress
from offbeat.run.recording import begun_by_first
from offbeat.run.records import Summary, add_to_summary, begin_attempt, create, lock
from offbeat.transport.connect import Launch, launched
from offbeat_lab.checkpoints import latest, remove_partial, verify
from offbeat_lab.cluster import Cluster
from offbeat_lab.config import Request, cluster_of, resolve, resolve_resume, task_of
from offbeat_lab.emulated_workers import EmulatedGroup
from offbeat_lab.emulation import emulate
from offbeat_lab.joining import join, leave
from offbeat_lab.memory import num_runs_that_fit
from offbeat_lab.records import Record
from offbeat_lab.schedule import position_from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A checked run that has touched nothing yet.

    Attributes:
        config: what to do.
        out: directory for the record, None for the next free one; the record's own when resuming.
        start_step: 0, or the step of the checkpoint to go on from.
        launch: this process's place under torchrun or srun, None when workers are to be started.
    """

    config: RunConfig
    out: Path | None
    start_step: int
    launch: Launch | None


def plan(request: Request, *, out: Path | None = None, resume: Path | None = None) -> RunPlan:
    """Check everything that can be checked before anything starts.

    Raises:
        ConfigError: the request cannot be run as asked.
        RecordError: `resume` is no record.
        CheckpointError: its checkpoint is missing, damaged or altered.
    """
    launch = launched()
    if launch is not None:
        if request.workers is not None and request.workers != launch.world_size:
            raise ConfigError(
                f"--workers {request.workers}, but {launch.world_size} processes were launched; "
                "leave --workers out or launch as many"
            )
        if request.cluster is not None and _needs_supervisor(request.cluster):
            raise ConfigError(
                f"{launch.world_size} processes were launched by torchrun or srun; links, speeds"
                " and faults are emulated only for workers that offbeat starts itself; leave them"
                " out, or start offbeat train alone"
            )
        request = replace(request, workers=launch.world_size)
    if resume is None:
        config = resolve(request)
        if launch is None:
            num_runs_that_fit(1, config.workers, task_of(config).num_parameters())
        return RunPlan(config=config, out=out, start_step=0, launch=launch)
    if out is not None and out.resolve() != resume.resolve():
        raise ConfigError(
            f"--resume goes on in {resume}, so --out {out} has no meaning; leave it out"
        )
    record = Record(resume)
    manifest = latest(record.checkpoint_root)
    verify(manifest)
    position = position_from_json(manifest.metadata.get("position"))
    config = resolve_resume(
        record.config, request, steps_done=position.step, epochs_done=position.epoch
    )
    return RunPlan(config=config, out=resume, start_step=manifest.step, launch=launch)


def _needs_supervisor(cluster: Cluster) -> bool:
    """Whether workers cannot emulate it by themselves, as they can be late and pad their steps."""
    uneven = cluster.step_s is None and min(cluster.speeds) < max(cluster.speeds)
    limited = any(not cluster.link_of(worker).is_plain for worker in range(cluster.workers))
    return uneven or limited or bool(cluster.faults) or bool(cluster.changes)


def train(
    planned: RunPlan, on_progress: Listener, on_notice: NoticeListener = lambda notice: None
) -> Summary | None:
    """Carry `planned` out. `on_notice` is called with each notice that there is before the first
    step; all of them are in the summary too.

    Returns:
        The summary; None on ranks other than 0 under torchrun or srun.

    Raises:
        RecordError: the output directory is in use.
        PeerError: a worker died or failed that its peers need; the message names it and says how
            to go on.
        OffbeatError: under torchrun or srun, what went wrong on this rank.
    """
    if planned.launch is not None:
        return _join(planned, on_progress, on_notice)
    directory = _directory(planned)
    config = planned.config
    with (
        lock(directory),
        emulate(
            cluster_of(config) or Cluster(workers=config.workers), mode=config.emulation
        ) as emulation,
    ):
        report = None if config.cluster is None else emulation.report
        begin_attempt(directory, config, start_step=planned.start_step, emulation=report)
        group = EmulatedGroup(
            directory, config, emulation, on_progress=on_progress, on_notice=on_notice
        )
        try:
            with interrupts() as interrupted, group:
                group.run_to_end(interrupted)
                group.has_finished()  # raises where it has failed
        finally:
            remove_partial(directory / "checkpoint")  # of workers that died while they wrote
        summary = add_to_summary(directory, group.remarks, group.losses)
        if summary is None:
            raise RecordError(f"the workers ended without a summary; see {directory / 'logs'}")
    return summary


def _join(planned: RunPlan, on_progress: Listener, on_notice: NoticeListener) -> Summary | None:
    from offbeat_lab.training import train_rank  # the supervisor's side needs no session

    coordinator = join()
    with ExitStack() as claim:

        def begin() -> Path:
            directory = _directory(planned)
            claim.enter_context(lock(directory))
            begin_attempt(directory, planned.config, start_step=planned.start_step)
            return directory

        chosen = begun_by_first(coordinator, begin)
        if not (chosen / "config.json").exists():
            raise ConfigError(
                f"rank {coordinator.rank} does not see {chosen}; give an --out on a file system"
                " that all hosts share"
            )

        def hear(report: Report) -> None:
            match report:
                case WorkerProgress():
                    on_progress(report)
                case Remark(text=text):
                    on_notice(text)

        summary = train_rank(chosen, coordinator, hear)
    leave()
    return summary


def _directory(planned: RunPlan) -> Path:
    if planned.start_step:
        assert planned.out is not None
        return planned.out
    return create(planned.out, planned.config)
