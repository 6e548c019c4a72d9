"""A record as TensorBoard scalars, against the step. TensorBoard is an optional extra: `pip install
offbeat[tensorboard]`.
"""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from offbeat.errors import ConfigError, RecordError
from offbeat.run.records import StepEvent
from offbeat_lab.breakdown import combine_events
from offbeat_lab.report.trace import TraceTimeline, open_runs, refuse_existing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write_scalars(run: Path, out: Path) -> None:
    """Write the scalars of a run to the new directory `out`, or those of each run of a comparison
    to a directory below it.

    Tags: ``loss`` (mean over ranks), ``metric``, ``bytes per step`` (mean over ranks), ``wait
        share`` (of the time of all
    ranks, 0 to 1) and ``step time in s/rank N``. `docs/trace.md` describes them.

    Raises:
        ConfigError: TensorBoard is not installed, or `out` exists. Nothing in it is touched.
        RecordError: `run` is no record, one of a newer version, damaged or still empty, or `out`
            cannot be written. There is no half-written directory then.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard cannot be imported ({error}); pip install offbeat[tensorboard]"
        ) from None
    runs = open_runs(run)
    refuse_existing(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        for name, timeline in runs:
            with SummaryWriter(str(temporary / name)) as writer:
                _write(timeline, writer)
        os.replace(temporary, out)
    except OSError as error:
        raise RecordError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(timeline: TraceTimeline, writer: SummaryWriter) -> None:
    for step, by_rank in _steps(timeline):
        ended_ns = max(
            timeline.at_ns(rank, step, event.began_s + event.duration_s)
            for rank, event in by_rank.items()
        )
        at_unix_s = (timeline.began_unix_ns + ended_ns) / 1e9
        for tag, value in _scalars(by_rank).items():
            writer.add_scalar(tag, value, step, at_unix_s)
    for evaluation in timeline.evaluations():
        at_unix_s = (
            timeline.began_unix_ns
            + timeline.at_ns(evaluation.rank, evaluation.step, evaluation.at_s)
        ) / 1e9
        writer.add_scalar("metric", evaluation.metric, evaluation.step, at_unix_s)


def _scalars(by_rank: dict[int, StepEvent]) -> dict[str, float]:
    events = by_rank.values()
    scalars = {f"step time in s/rank {rank}": event.duration_s for rank, event in by_rank.items()}
    scalars["bytes per step"] = fmean(event.bytes_sent for event in events)
    if all_ranks_s := sum(event.duration_s for event in events):
        scalars["wait share"] = sum(event.wait_s for event in events) / all_ranks_s
    if losses := [event.loss for event in events if event.loss is not None]:
        scalars["loss"] = fmean(losses)
    return scalars


def _steps(timeline: TraceTimeline) -> Iterator[tuple[int, dict[int, StepEvent]]]:
    """Each step with the events of the ranks that took part, by rank. Reads all ranks at once, so
    that none is kept.
    """

    def of(rank: int) -> Iterator[tuple[int, int, StepEvent]]:
        return ((event.step, rank, event) for event in timeline.record.events(rank))

    merged = heapq.merge(*map(of, timeline.ranks), key=lambda entry: entry[:2])
    for step, entries in groupby(merged, key=lambda entry: entry[0]):
        by_rank: dict[int, StepEvent] = {}
        for _, rank, event in entries:  # several of a rank where samples are claimed
            by_rank[rank] = combine_events(by_rank[rank], event) if rank in by_rank else event
        yield step, by_rank
