"""Measures the metric on the leader while training goes on.

Where the leader averages alone, its peers train on while it fetches their models and measures. It
is late by that in each measurement, and has its last steps to itself when they have finished. So
in a comparison each rank keeps a copy of its own model in the steps that are to be measured, and
the leader measures their means when all have finished: nobody does more for a measurement than
copy, and what is measured is the mean after equally many steps of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offbeat.lab.step_recorder import KeptModel, StepRecorder, TaskRun

_KEPT_ELEMENTS = 64 * 2**20
"""So many elements of kept models at most on each rank, 256 MiB where they are float32. Where they
would be more, the leader measures at once.
"""


def keeps_models(num_parameters: int, steps: int, eval_every: int | None) -> bool:
    """Whether a rank can keep what is to be measured of a run that averages alone."""
    return eval_every is not None and steps // eval_every * num_parameters <= _KEPT_ELEMENTS


def evaluate(run: TaskRun, recorder: StepRecorder) -> None:
    """Measure the metric on the leader; no rank's training time counts it. Where the leader can
    average alone, no other rank waits for it. Where models are kept, it is measured later.
    """
    coordinator, step, apart = (
        run.coordinator,
        run.schedule.position.step,
        run.attached.session.averages_alone,
    )
    if apart and run.keeps_models:
        state = {
            name: each.detach().clone().contiguous()
            for name, each in run.attached.model.state_dict().items()
        }
        run.kept.append(KeptModel(state=state, at=recorder.evaluation(math.nan, {})))
        recorder.restart_clock()
        return
    # A leader before this one may have been ahead.
    leads = coordinator.leader == coordinator.rank and step > int(
        coordinator.published("measured") or -1
    )
    if leads or not apart:
        # Before the first step all ranks hold the same model, and where the leader averages alone
        # its peers have none to send yet.
        model = run.attached.model if apart and not step else run.attached.averaged_model()
        if leads:
            model.eval()
            with run.attached.resting():
                metrics = run.task.metrics(model)
            run.attached.log(metrics)
            metric = metrics.pop(run.task.metric_name)
            recorder.add_evaluation(metric, metrics, without=run.attached.averaged_without)
            model.train()
            coordinator.publish("measured", str(step))
    if not apart:
        coordinator.gather_living(f"measured/{step}", "", step=step)
    recorder.restart_clock()


def hand_over(run: TaskRun) -> None:
    """Write the models that this rank has kept where the leader finds them."""
    for one in run.kept:
        path = _path(run, one.at.step, run.coordinator.rank)
        path.parent.mkdir(exist_ok=True)
        save_file(one.state, path)


def measure_kept(run: TaskRun, recorder: StepRecorder, model: nn.Module) -> None:
    """Measure the means of the models that all ranks have handed over, and remove those.

    Args:
        run, recorder: of the leader.
        model: takes the means; what it held is lost.
    """
    ranks = range(run.coordinator.world_size)
    for one in run.kept:
        paths = {rank: _path(run, one.at.step, rank) for rank in ranks}
        there = {rank: path for rank, path in paths.items() if path.exists()}
        model.load_state_dict(mean_of([load_file(path) for path in there.values()]))
        model.eval()
        metrics = run.task.metrics(model)
        metric = metrics.pop(run.task.metric_name)
        without = sorted(paths.keys() - there.keys())
        recorder.write_evaluation(replace(one.at, metric=metric, others=metrics, without=without))
        for path in there.values():
            path.unlink()
    if run.kept:
        _path(run, 0, 0).parent.rmdir()


def mean_of(states: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of floating-point tensors, the maximum of others, by name."""
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return {
        name: each.mean(dim=0) if each.is_floating_point() else each.amax(dim=0)
        for name, each in stacked.items()
    }


def _path(run: TaskRun, step: int, rank: int) -> Path:
    return run.record.path / "kept" / f"step-{step}-rank-{rank}.pt"
