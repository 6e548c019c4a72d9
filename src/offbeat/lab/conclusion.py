"""The end of a run: the replicas are compared, the leader measures the model and writes the
summary.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from typing import Final

import torch
from torch import nn

from offbeat.lab.records import Summary, write_summary
from offbeat.lab.watch import Run, Watch

HANGS_S: Final = 10.0
"""Where ranks do not keep step: for how long the end waits for one that does not come, though all
had finished.
"""

_TOLERATED: Final = 1.05
"""Where samples are claimed a run ends at a merge: so many times as many steps as it was to do need
no remark.
"""


def conclude(run: Run, watch: Watch) -> Summary | None:
    """Compare the replicas, measure the model on the leader, and write the summary. Returns it
    there.
    """
    config, step, session = run.record.config, run.schedule.position.step, run.attached.session
    last, apart = session.stats, session.averages_alone
    final = None if apart else run.attached.averaged_model()
    num_steps = max(1, step - watch.first_step)
    mine = {
        "digest": digest(run.attached.model),
        "bytes_per_step": (last.bytes_sent - watch.first.bytes_sent) / num_steps,
        "messages_per_step": (last.messages_sent - watch.first.messages_sent) / num_steps,
        "samples_per_s": watch.num_samples / watch.seconds if watch.seconds else 0.0,
        "peak_memory_bytes": _peak_memory_bytes(),
        "notices": [
            *session.notices,
            *run.notices,
            *_length_notices(run),
            *_pace_notices(run, num_steps),
        ],
    }
    told = run.meeting.gather("end", json.dumps(mine), patience_s=HANGS_S if apart else None)
    if not run.meeting.is_to_do("summary", {*told, run.meeting.rank}):
        return None
    if final is None:
        final = run.attached.averaged_model()
    ends = [json.loads(text) for text in told.values()]
    stopped = step < run.schedule.target
    metric, others = None, {}
    if not stopped:
        final.eval()
        others = run.task.metrics(final)
        metric = others.pop(run.task.metric_name)
        watch.measured(metric, others)
    identical = len({end["digest"] for end in ends}) == 1
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
        other_metrics=others,
        loss=watch.last_loss,
        seconds=watch.seconds,
        steps_per_s=(step - watch.first_step) / watch.seconds if watch.seconds else 0.0,
        samples_per_s=sum(end["samples_per_s"] for end in ends),
        bytes_sent_per_step=sum(end["bytes_per_step"] for end in ends) / len(ends),
        messages_sent_per_step=sum(end["messages_per_step"] for end in ends) / len(ends),
        peak_memory_bytes=[end["peak_memory_bytes"] for end in ends],
        skipped_steps=last.skipped_steps - watch.first.skipped_steps,
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
    run.meeting.note("summary", "written")
    return summary


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters and buffers of `model`, by name."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(name.encode())
        total.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return total.hexdigest()


def _replica_notices(run: Run, final: nn.Module, *, identical: bool) -> list[str]:
    return (
        []
        if final is run.attached.model or identical
        else ["the workers' models differ on purpose; the metric is that of their mean"]
    )


def _length_notices(run: Run) -> list[str]:
    step, asked = run.schedule.position.step, run.record.config.steps
    if asked is None or step <= asked * _TOLERATED:
        return []
    return [
        f"{asked} steps were asked for, and the first merge after them came at step {step}; a"
        " smaller mega_batch comes nearer"
    ]


def _pace_notices(run: Run, num_steps: int) -> list[str]:
    if run.pace.num_late * 20 < num_steps:
        return []
    what = (
        f"worker {run.meeting.rank} computed for longer than the emulated step in"
        f" {run.pace.num_late} of {num_steps} steps"
    )
    return [f"{what}; give a longer --step-time, or fewer workers"]


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
