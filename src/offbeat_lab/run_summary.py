"""The summary of a run, written at its end: the replicas are compared, and the leader measures the
model.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from offbeat.run.records import Summary, write_summary
from offbeat_lab.measuring import measure_rest
from offbeat_lab.step_recorder import RankRun, StepRecorder, TaskRun

HANGS_S: Final = 10.0
"""Where ranks do not keep step: for how long the end waits for one that does not come, though all
had finished.
"""

_TOLERATED: Final = 1.05
"""Where samples are claimed a run ends at a merge: so many times as many steps as it was to do need
no remark.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured of the final model.

    Attributes:
        metric: its value; None if it was not measured.
        name, higher_is_better: of the metric.
        others: what else was measured, by name.
    """

    metric: float | None
    name: str
    higher_is_better: bool
    others: Mapping[str, float] = field(default_factory=dict)


def summarize_run(run: TaskRun, recorder: StepRecorder) -> Summary | None:
    """Compare the replicas, measure the model on the leader, and write the summary. Returns it
    there.
    """
    step, session, task = run.schedule.position.step, run.attached.session, run.task
    apart = session.averages_alone
    final = None if apart else run.attached.averaged_model()
    num_steps = max(1, step - recorder.first_step)
    notices = [*_length_notices(run), *_step_time_notices(run, num_steps)]
    ends = gather_ends(run, recorder, notices, patience_s=HANGS_S if apart else None)
    if ends is None:
        return None
    measure_rest(run, recorder)
    if final is None:
        final = run.attached.averaged_model()
    stopped = step < run.schedule.target
    metric, others = None, {}
    if not stopped:
        final.eval()
        others = task.metrics(final)
        run.attached.log(others)
        metric = others.pop(task.metric_name)
        measured_at = recorder.evaluation(metric, others, without=run.attached.averaged_without)
        if apart:  # What is measured was there when the last rank had finished.
            measured_at = replace(measured_at, seconds=max(end["seconds"] for end in ends))
        recorder.write_evaluation(measured_at)
    measured = Measured(
        metric=metric,
        name=task.metric_name,
        higher_is_better=task.higher_is_better,
        others=others,
    )
    return write_end(run, recorder, ends, measured, final, finished=not stopped)


def gather_ends(
    run: RankRun,
    recorder: StepRecorder,
    notices: Sequence[str],
    *,
    patience_s: float | None,
    step: int | None = None,
) -> list[dict[str, Any]] | None:
    """What each living rank has to say at its end; None on ranks that do not lead.

    Args:
        run, recorder: of this rank, which has done its last step.
        notices: of this rank, besides those of its session.
        patience_s: how long to wait for late ranks; None: for ever.
        step: a rank that came back is waited for if it took part in this step; None: in any case.
    """
    last, session = run.attached.session.stats, run.attached.session
    num_steps = max(1, run.schedule.position.step - recorder.first_step)
    mine = {
        "digest": digest(run.attached.model),
        "seconds": recorder.evaluation(math.nan, {}).seconds,
        "bytes_per_step": (last.bytes_sent - recorder.first.bytes_sent) / num_steps,
        "messages_per_step": (last.messages_sent - recorder.first.messages_sent) / num_steps,
        "samples_per_s": recorder.num_samples / recorder.seconds if recorder.seconds else 0.0,
        "mean_entry_age": last.mean_entry_age,
        "peak_memory_bytes": _peak_memory_bytes(),
        "notices": [*session.notices, *run.notices, *notices],
    }
    told = run.coordinator.gather_living("end", json.dumps(mine), step=step, patience_s=patience_s)
    if not run.coordinator.must_perform("summary", {*told, run.coordinator.rank}):
        return None
    return [json.loads(text) for text in told.values()]


def write_end(
    run: RankRun,
    recorder: StepRecorder,
    ends: Sequence[Mapping[str, Any]],
    measured: Measured,
    final: nn.Module,
    *,
    finished: bool,
) -> Summary:
    """Write the summary, as the rank that leads.

    Args:
        run, recorder: of this rank.
        ends: from `gather_ends`.
        measured: of the final model.
        final: that model.
        finished: False where the run was stopped before its end.
    """
    config, step, last = run.record.config, run.schedule.position.step, run.attached.session.stats
    entry_ages = [end["mean_entry_age"] for end in ends if end["mean_entry_age"] is not None]
    identical = len({end["digest"] for end in ends}) == 1
    summary = Summary(
        status="finished" if finished else "stopped",
        task=config.task,
        strategy=config.strategy,
        workers=config.workers,
        world_size=run.coordinator.world_size,
        steps=step,
        metric=measured.metric,
        metric_name=measured.name,
        higher_is_better=measured.higher_is_better,
        other_metrics=dict(measured.others),
        loss=recorder.last_loss,
        seconds=recorder.seconds,
        steps_per_s=(step - recorder.first_step) / recorder.seconds if recorder.seconds else 0.0,
        samples_per_s=sum(end["samples_per_s"] for end in ends),
        bytes_sent_per_step=sum(end["bytes_per_step"] for end in ends) / len(ends),
        messages_sent_per_step=sum(end["messages_per_step"] for end in ends) / len(ends),
        peak_memory_bytes=[end["peak_memory_bytes"] for end in ends],
        skipped_steps=last.skipped_steps - recorder.first.skipped_steps,
        mean_entry_age=sum(entry_ages) / len(entry_ages) if entry_ages else None,
        num_parameters=sum(parameter.numel() for parameter in run.attached.model.parameters()),
        parameters_sha256=digest(final),
        replicas_identical=identical,
        resumed_from_step=run.record.attempts[-1].start_step or None,
        notices=list(
            dict.fromkeys(
                [
                    *(n for end in ends for n in end["notices"]),
                    *_replica_notices(run, final, identical=identical),
                ]
            )
        ),
        run_directory=str(run.record.path),
    )
    write_summary(summary)
    run.coordinator.publish("summary", "written")
    return summary


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters of `model`, by name. Buffers stay out of it: where gradients are
    exchanged, each rank has BatchNorm statistics of its own.
    """
    total = hashlib.sha256()
    for name, tensor in model.named_parameters():
        total.update(name.encode())
        total.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return total.hexdigest()


def _replica_notices(run: RankRun, final: nn.Module, *, identical: bool) -> list[str]:
    return (
        []
        if final is run.attached.model or identical
        else ["the workers' models differ on purpose; the metric is that of their mean"]
    )


def _length_notices(run: TaskRun) -> list[str]:
    step, asked = run.schedule.position.step, run.record.config.steps
    if asked is None or step <= asked * _TOLERATED:
        return []
    return [
        f"{asked} steps were asked for, and the first merge after them came at step {step}; a"
        " smaller mega_batch comes nearer"
    ]


def _step_time_notices(run: TaskRun, num_steps: int) -> list[str]:
    if run.step_time.num_late * 20 < num_steps:
        return []
    what = (
        f"worker {run.coordinator.rank} computed for longer than the emulated step in"
        f" {run.step_time.num_late} of {num_steps} steps"
    )
    return [f"{what}; give a longer --step-time, or fewer workers"]


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
