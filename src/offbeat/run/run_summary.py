"""The summary of a run, written at its end: the replicas are compared, and the leader writes."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from offbeat.run.coordination import Coordinator
from offbeat.run.records import Summary, write_summary
from offbeat.run.step_recorder import StepRecorder
from offbeat.session.sharded import reshard_modules
from offbeat.session.state import digest_of
from offbeat.weights.shard import shard_number

HANGS_S: Final = 10.0
"""Where ranks do not keep step: for how long the end waits for one that does not come, though all
had finished.
"""

_END: Final = "end"


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


def gather_ends(
    recorder: StepRecorder,
    notices: Sequence[str],
    *,
    patience_s: float | None,
    step: int | None = None,
) -> list[dict[str, Any]] | None:
    """What each living rank has to say at its end; None on ranks that do not lead.

    Args:
        recorder: of this rank, which has done its last step.
        notices: of this rank, besides those of its session.
        patience_s: how long to wait for late ranks; None: for ever.
        step: a rank that came back is waited for if it took part in this step; None: in any case.
    """
    run = recorder.run
    last, session = run.attached.session.stats, run.attached.session
    num_steps = max(1, run.schedule.position.step - recorder.first_step)
    mine = {
        "step": run.schedule.position.step,
        "digest": digest(run.attached.model),
        "shard": shard_number(run.attached.model),
        "seconds": recorder.evaluation(math.nan, {}).seconds,
        "bytes_per_step": (last.bytes_sent - recorder.first.bytes_sent) / num_steps,
        "messages_per_step": (last.messages_sent - recorder.first.messages_sent) / num_steps,
        "samples_per_s": recorder.num_samples / recorder.seconds if recorder.seconds else 0.0,
        "mean_entry_age": last.mean_entry_age,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "notices": [*session.notices, *run.notices, *notices],
    }
    told = run.coordinator.gather_living(_END, json.dumps(mine), step=step, patience_s=patience_s)
    if not run.coordinator.must_perform("summary", {*told, run.coordinator.rank}):
        return None
    ends = [json.loads(text) for text in told.values() if text]
    if missing := [str(rank) for rank, text in told.items() if not text]:
        ends[0]["notices"].append(
            f"what rank {', '.join(missing)} did is not recorded: this directory is not seen there"
        )
    return ends


def leave_out(coordinator: Coordinator) -> None:
    """Nobody is to wait for what this rank has to say at its end: it is not recorded."""
    coordinator.publish(f"{_END}/{coordinator.rank}", "")


def write_end(
    recorder: StepRecorder,
    ends: Sequence[Mapping[str, Any]],
    measured: Measured,
    final: nn.Module,
    *,
    finished: bool,
) -> Summary:
    """Write the summary, as the rank that leads.

    Args:
        recorder: of this rank.
        ends: from `gather_ends`.
        measured: of the final model.
        final: that model.
        finished: False where the run was stopped before its end.
    """
    run = recorder.run
    config, step, last = run.record.config, run.schedule.position.step, run.attached.session.stats
    entry_ages = [end["mean_entry_age"] for end in ends if end["mean_entry_age"] is not None]
    shards = {end["shard"] for end in ends}
    identical = len({(end["shard"], end["digest"]) for end in ends}) == len(shards)
    notices = [notice for end in ends for notice in end["notices"]]
    if not (final is run.attached.model or identical):
        notices.append("the workers' models differ on purpose; the metric is that of their mean")
    summary = Summary(
        status="finished" if finished else "stopped",
        task=config.task,
        strategy=config.strategy,
        workers=config.workers,
        world_size=run.coordinator.world_size,
        steps=max(end["step"] for end in ends),
        metric=measured.metric,
        metric_name=measured.name,
        higher_is_better=measured.higher_is_better,
        other_metrics={k: each for k, each in measured.others.items() if math.isfinite(each)},
        loss=recorder.last_loss,
        seconds=recorder.evaluation(math.nan, {}).seconds,
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
        notices=list(dict.fromkeys(notices)),
        decisions=run.attached.session.decisions,
        run_directory=str(run.record.path),
    )
    write_summary(summary)
    run.coordinator.publish("summary", "written")
    return summary


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters of `model`, by name. Buffers stay out of it: where gradients are
    exchanged, each rank has BatchNorm statistics of its own. Of a sharded model it is that of this
    rank's shards.
    """
    reshard_modules(model)
    return digest_of(model.named_parameters())
