"""Measures the metric on the leader while training goes on.

Where the leader averages alone, its peers train on while it fetches their models and measures, so
what it measures had more steps than it says. So each rank keeps a copy of its own model in the
steps that are to be measured, and the leader measures their mean: after equally many steps of each
rank, in the training time that the last of them took for these.

A leader that measures in the middle of a run is late by that, and has its last steps to itself when
its peers have finished. So where strategies are compared it measures when all have finished, and
nobody does more for a measurement than copy. A single run is to be watched, and is measured as soon
as all copies are there.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from offbeat.codec.tensor_bytes import to_bytes
from offbeat.run.records import Evaluation
from offbeat_lab.task_recorder import TaskRecorder, TaskRun

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
    metric, others = _metrics(run, model)
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
            metric, others = _metrics(run, model)
            recorder.add_evaluation(metric, others, without=run.attached.session.averaged_without)
            model.train()
            coordinator.publish("measured", str(step))
    if not apart:
        coordinator.gather_living(f"measured/{step}", "", step=step)


def _metrics(run: TaskRun, model: torch.nn.Module) -> tuple[float, dict[str, float]]:
    """The metric of `model`, and whatever else the task measures."""
    model.eval()
    with run.attached.session.resting():
        metrics = run.task.metrics(model)
    run.attached.session.log(**metrics)
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
