"""Builds the page's values from one run: a report with a single contestant."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from offbeat.run.config import RunConfig, ScriptCommand
from offbeat.run.records import Summary
from offbeat_lab.breakdown import Steps
from offbeat_lab.config import cluster_of
from offbeat_lab.records import Record
from offbeat_lab.report.data import Better, PageContent, StrategyResults
from offbeat_lab.report.data_records import (
    count_workers,
    incomplete_means,
    read_run,
    rows,
    setting,
    words,
)
from offbeat_lab.report.style import NUMBER, SECONDS, capital, write
from offbeat_lab.statistics import Estimate


def report_of_run(directory: Path) -> PageContent:
    """Everything that the page shows of the run in `directory`. Raises `RecordError`."""
    record = Record(directory)
    config, summary = record.config, record.summary()
    run = read_run(record, name=record.path.name)
    measures = _measures(run.steps, summary)
    metric_name = words(summary.metric_name) if summary else "metric"
    status = {
        "stopped": "The run was stopped before its end.",
        "unfinished": "The run goes on, or was killed: it has no summary.",
    }
    length = (
        [("steps", f"{config.steps:,}")]
        if config.steps is not None
        else [("epochs", f"{config.epochs:,}")]
        if config.epochs is not None
        else []
    )
    return PageContent(
        title=f"{config.strategy} on {config.task}, {count_workers(config.workers)}",
        verdict=_verdict(run.steps, summary, metric_name),
        winner=config.strategy,
        unfinished=status.get(run.status),
        created_at=record.attempts[0].started_at if record.attempts else "",
        metric_name=metric_name,
        metric_better=Better.HIGHER
        if summary is None or summary.higher_is_better
        else Better.LOWER,
        contestants=[
            StrategyResults(
                label=config.strategy,
                strategy=config.strategy,
                options=config.strategy_options,
                runs=[run] if run.steps.num_steps else [],
                measures=measures,
                notices=[*(summary.notices if summary else []), *incomplete_means(record)],
            )
        ],
        setting=setting(record.emulation, cluster_of(config)),
        details=[
            ("task" if config.script is None else "script", config.task),
            *rows(config.task_options),
            *(
                [("batch shares", "/".join(f"{share:g}" for share in config.batch_shares))]
                if config.batch_shares
                else []
            ),
            ("workers", str(config.workers)),
            *length,
            *([("seed", str(config.seed))] if config.script is None else []),
            *([("parameters", f"{summary.num_parameters:,}")] if summary else []),
            *(
                [("replicas at the end", "identical" if summary.replicas_identical else "differ")]
                if summary
                else []
            ),
            *([("skipped steps", f"{summary.skipped_steps:,}")] if summary else []),
            *(
                [("steps from one sending of an entry to the next", f"{age:.3g}")]
                if summary and (age := summary.mean_entry_age) is not None
                else []
            ),
            *([("workers that died", _losses(summary))] if summary and summary.losses else []),
        ],
        environment=rows(record.environment),
        command=_command(record),
    )


def _verdict(steps: Steps, summary: Summary | None, metric_name: str) -> str:
    if summary is None:
        return f"{steps.num_steps:,} steps are recorded, and no summary."
    metric = (
        f"{metric_name} {write(summary.metric, NUMBER)} after "
        if summary.metric is not None
        else ""
    )
    return capital(
        f"{metric}{summary.steps:,} steps and {write(summary.seconds, SECONDS)} of training."
    )


def _losses(summary: Summary) -> str:
    """Such as `3 after step 57 (back after step 90)`, each."""
    return ", ".join(
        f"{loss.rank} after step {loss.step:,}"
        + ("" if loss.returned_step is None else f" (back after step {loss.returned_step:,})")
        for loss in summary.losses
    )


def _measures(steps: Steps, summary: Summary | None) -> dict[str, Estimate]:
    """As a comparison would measure them: the first steps are left out of what is said
    about steps.
    """
    found: dict[str, float | None] = {}
    if steps.num_steps:
        found = {
            "step_s": float(np.median(steps.block_step_s())),
            "samples_per_s": float(np.median(steps.block_samples_per_s())),
            **{f"share_{phase}": share for phase, share in steps.settled().shares().items()},
        }
    if summary is not None:
        found |= {
            "final_metric": summary.metric,
            "bytes_per_step": summary.bytes_sent_per_step,
            "messages_per_step": summary.messages_sent_per_step,
            "peak_memory_bytes": max(summary.peak_memory_bytes, default=None),
        }
    return {
        name: Estimate(values=[value], median=value, low=None, high=None)
        for name, value in found.items()
    }


def _command(record: Record) -> str:
    """The command line that starts the same run anew."""
    config = record.config
    if config.script is not None:
        return _command_of_script(config, config.script)
    words = [
        "offbeat",
        "train",
        "--task",
        config.task,
        "--strategy",
        config.strategy,
        "--workers",
        str(config.workers),
    ]
    words += (
        ["--steps", str(config.steps)]
        if config.steps is not None
        else ["--epochs", str(config.epochs)]
    )
    words += ["--seed", str(config.seed)]
    words += ["--eval-every", str(config.eval_every)] if config.eval_every is not None else []
    words += ["--cluster", "cluster.toml"] if config.cluster is not None else []
    for name, value in {**config.task_options, **config.strategy_options}.items():
        words += ["--set", f"{name}={_typed(value)}"] if value is not None else []
    return shlex.join(words)


def _command_of_script(config: RunConfig, script: ScriptCommand) -> str:
    options = [f"{k}={_typed(v)}" for k, v in config.strategy_options.items() if v is not None]
    words = ["offbeat", "run", "--strategy", ":".join([config.strategy, *options])]
    words += ["--workers", str(config.workers)]
    words += ["--steps", str(config.steps)] if config.steps is not None else []
    words += ["--metric", script.metric] if script.metric is not None else []
    words += ["--module"] if script.as_module else []
    return shlex.join([*words, script.path, *script.arguments])


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
