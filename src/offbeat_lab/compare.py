"""Strategies side by side: the same task, the same seeds, the same machine, by turns
(`offbeat_lab.interleaving`).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import psutil
from pydantic import JsonValue

from offbeat.errors import OffbeatError, RecordError
from offbeat.run import records
from offbeat.run.interrupts import interrupts
from offbeat.session.checkpoint import Json
from offbeat_lab.analysis import analyse
from offbeat_lab.compare_plan import ComparePlan, CompareRequest, check_free, plan_comparison
from offbeat_lab.comparison import Comparison, write_comparison
from offbeat_lab.config import task_of
from offbeat_lab.emulation import Emulation, emulate
from offbeat_lab.interleaving import ComparisonListener, InterleavedRuns

__all__ = [
    "ComparePlan",
    "CompareRequest",
    "ComparisonListener",
    "plan_comparison",
    "run_comparison",
]


def run_comparison(
    plan: ComparePlan, listener: ComparisonListener, *, command: str
) -> tuple[Path, Comparison]:
    """Run the comparison and write its directory.

    Args:
        plan: from `plan_comparison`.
        listener: is told how it goes on.
        command: that reproduces it, for the record.

    Returns:
        The directory, and what was found. When a strategy fails, the others go on.

    Raises:
        RecordError: the directory is in use, or the disk does not take the record.
        ConfigError: the cluster cannot be emulated as asked.
    """
    request = plan.request
    directory = plan.out if plan.out is not None else first_free(f"compare-{request.task}")
    check_free(directory)
    with emulate(request.cluster, mode=request.emulation) as emulation:
        _make_directory(directory)
        comparison = _begin(plan, emulation, command)
        write_comparison(directory, comparison)
        listener.begin(
            [c.label for c in plan.contestants],
            request.cluster.workers,
            len(request.seeds),
            plan.steps,
        )
        runs = InterleavedRuns(directory, plan, emulation, listener)
        try:
            with interrupts() as interrupted:
                for place, seed in enumerate(request.seeds):
                    listener.seed(place)
                    runs.run_seed(place, seed, interrupted)
                    if interrupted.count:
                        break
        except (OffbeatError, OSError):
            with suppress(
                OffbeatError
            ):  # the disk may be full, and what goes on then is the first error
                write_comparison(directory, comparison.model_copy(update={"status": "stopped"}))
            raise
    contestants = [
        c.model_copy(update={"failure": runs.failures.get(c.label)}) for c in comparison.contestants
    ]
    if interrupted.count:
        comparison = comparison.model_copy(update={"status": "stopped", "contestants": contestants})
    else:
        comparison = comparison.model_copy(update={"contestants": contestants})
        if plan.request.script is not None:
            comparison = _with_metric_of_runs(directory, comparison)
        comparison = analyse(directory, comparison, runs.alone)
        comparison = comparison.model_copy(update={"status": "finished"})
    write_comparison(directory, comparison)
    return directory, comparison


def _with_metric_of_runs(directory: Path, comparison: Comparison) -> Comparison:
    """`comparison` with what only the runs of a script tell: its metric and its model's size."""
    summaries = (
        records.Record(directory / run).summary()
        for contestant in comparison.contestants
        if contestant.failure is None
        for run in contestant.runs
    )
    summary = next(filter(None, summaries), None)
    if summary is None:
        return comparison
    return comparison.model_copy(
        update={
            "metric_name": summary.metric_name,
            "higher_is_better": summary.higher_is_better,
            "num_parameters": summary.num_parameters,
        }
    )


def _make_directory(directory: Path) -> None:
    try:
        (directory / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"cannot write {directory}: {error.strerror}; choose another --out"
        ) from None


def first_free(name: str) -> Path:
    """The first directory below runs/ of this name and a number that is not there yet."""
    number = 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path


def _begin(plan: ComparePlan, emulation: Emulation, command: str) -> Comparison:
    request, config = plan.request, plan.configs[0]
    task = None if config.script is not None else task_of(config)
    report = emulation.report
    together = len(plan.contestants) + 1
    if plan.at_once < together:
        notice = (
            f"{plan.at_once} of {together} runs fit into memory at a time, so not all strategies"
            " took turns with each other"
        )
        report = replace(report, notices=[*report.notices, notice])
    return Comparison(
        status="running",
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        task=config.task,
        task_options=cast(dict[str, JsonValue], config.task_options),
        metric_name="metric" if task is None else task.metric_name,
        higher_is_better=task is not None and task.higher_is_better,
        target=request.target,
        target_was_given=request.target is not None,
        seeds=list(request.seeds),
        steps=plan.steps,
        workers=request.cluster.workers,
        num_parameters=plan.num_parameters,
        cluster=request.cluster,
        emulation=report,
        environment=cast(dict[str, JsonValue], records.environment() | _machine()),
        contestants=list(plan.contestants),
    )


def _machine() -> dict[str, Json]:
    return {
        "host": platform.node(),
        "cpu": next(_cpu_models(), platform.machine()),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_models() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
