"""Writes the page of a run or of a comparison: reads the records, and writes one HTML file that
needs nothing else, not even a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import chain
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup

from offbeat.errors import RecordError
from offbeat.run.config import RunConfig, ScriptCommand
from offbeat.run.records import Evaluation, Summary, write_whole
from offbeat_lab.analysis import winner
from offbeat_lab.breakdown import Steps, read_steps
from offbeat_lab.comparison import ComparedStrategy, is_comparison, read_comparison
from offbeat_lab.config import cluster_of
from offbeat_lab.figures import (
    BITS_PER_S,
    BYTES,
    NUMBER,
    SECONDS,
    SHARE,
    Better,
    capital,
    write,
    write_option,
)
from offbeat_lab.options import BATCH_SHARES
from offbeat_lab.records import Record
from offbeat_lab.report import page_sections as sections
from offbeat_lab.report import page_summary as summary
from offbeat_lab.report.charts import line_charts, timelines
from offbeat_lab.report.charts_dispatch import dispatches
from offbeat_lab.report.data import Curve, PageContent, RunResults, StrategyResults
from offbeat_lab.statistics import Estimate

NAME = "report.html"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[µm]?s|min|h|[kMGT]?B|[kMG]?bit/s|times|steps)\b)")
"""Where a sentence must not break."""


def write_report(directory: Path) -> Path:
    """Write the report of the run or comparison in `directory` as its `report.html`, and return
    that path.

    Raises:
        RecordError: there is nothing to report on, a newer version wrote it, or the page cannot be
            written. An earlier page is then left as it was.
    """
    path = directory / NAME
    write_whole(path, render(read_report(directory)), "make room, or report on a copy elsewhere")
    return path


def read_report(directory: Path) -> PageContent:
    """What is to be said of the run or comparison in `directory`. Raises `RecordError`, see
    `write_report`.
    """
    if is_comparison(directory):
        return report_of_comparison(directory)
    if (directory / "config.json").exists():
        return report_of_run(directory)
    raise RecordError(
        f"{directory} holds neither a run nor a comparison; give the directory that offbeat train"
        " or offbeat compare printed"
    )


def render(report: PageContent) -> str:
    """The page as text. Everything that comes from records is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": lambda value: write(value, SECONDS),
        "rate": lambda value: write(value, BITS_PER_S),
        "share": lambda value: write(value, SHARE),
        "option": write_option,
        "together": lambda text: _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text),
    }
    charts, advice = line_charts(report), summary.advice(report)
    windows = list(timelines(report))
    divided = list(dispatches(report))
    script = _asset("report.js")
    return environment.from_string(_asset("report.html")).render(
        report=report,
        rows=list(sections.rows(report)),
        numbers=summary.key_numbers(report),
        advice=advice.text if advice is not None else "",
        differences=list(sections.difference_rows(report)),
        charts=charts,
        timelines=windows,
        step_bars=sections.step_bars(report),
        lateness=list(sections.lateness_bars(report)),
        traffic=list(sections.traffic_bars(report)),
        dispatches=divided,
        shares=sections.SHARES,
        style=Markup(_asset("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_embed(
            {
                "strategies": [strategy.label for strategy in report.strategies],
                "seeds": [[run.seed for run in strategy.runs] for strategy in report.strategies],
                "charts": {
                    chart.key: asdict(chart)
                    for chart in chain(charts, *(one.charts for one in divided))
                },
                "advised": 0 if advice is None else advice.strategy,
                "timelines": [asdict(window) for window in windows],
            }
        ),
    )


def _asset(name: str) -> str:
    """A file of the page. Its script and style are put between tags as they are, so they must not
    hold an end of one.
    """
    return (resources.files("offbeat_lab.report") / "assets" / name).read_text(encoding="utf-8")


def _embed(values: Mapping[str, object]) -> Markup:
    """JSON that no HTML parser can take for the end of its element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def read_run(record: Record, *, name: str) -> RunResults:
    """One run: its steps on one clock, and its metric on the way."""
    steps = read_steps(record)
    summary = record.summary()
    return RunResults(
        seed=record.config.seed,
        directory=name,
        status=summary.status if summary else "unfinished",
        curve=_curve(record.evaluations(), steps),
        steps=steps,
        last_start=record.attempts[-1].start_step if record.attempts else 0,
        losses=summary.losses if summary else (),
        decisions=summary.decisions if summary else (),
        mega_batches=record.mega_batches(),
    )


def _curve(evaluations: Sequence[Evaluation], steps: Steps) -> Curve:
    """Bytes are the mean over the workers that did a step wherever every step's are known, else of
    the rank that measured.
    """
    at = np.array([evaluation.step for evaluation in evaluations], dtype=np.float64)
    bytes_sent = np.array([evaluation.bytes_sent for evaluation in evaluations], dtype=np.float64)
    if (
        at.size
        and np.array_equal(steps.step, np.arange(1, steps.num_steps + 1))
        and at[-1] <= steps.num_steps
    ):
        total = np.concatenate([[0.0], np.cumsum(np.nanmean(steps.bytes_sent, axis=0))])
        bytes_sent = total[at.astype(np.int64)]
    return Curve(
        steps=at,
        seconds=np.array([evaluation.seconds for evaluation in evaluations], dtype=np.float64),
        bytes_sent=bytes_sent,
        metric=np.array([evaluation.metric for evaluation in evaluations], dtype=np.float64),
    )


def incomplete_means(record: Record) -> list[str]:
    """A remark on the measurements of means that lack models of living workers, if there are."""
    marked = [evaluation for evaluation in record.evaluations() if evaluation.without]
    if not marked:
        return []
    steps = ", ".join(f"{evaluation.step:,}" for evaluation in marked)
    workers = sorted({rank for evaluation in marked for rank in evaluation.without})
    return [
        f"the metric at step {steps} is that of a mean without worker"
        f" {', '.join(map(str, workers))}, which did not answer in time"
    ]


def rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Options or versions, as (name, value) for people."""
    return [
        (words(name.removesuffix("_bytes")), write(value, BYTES))
        if name.endswith("_bytes") and isinstance(value, int)
        else (words(name), write_option(value))
        for name, value in values.items()
    ]


def words(name: str) -> str:
    """An identifier as people write it."""
    return name.replace("_", " ")


def count_workers(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"


def report_of_comparison(directory: Path) -> PageContent:
    """Everything that the page shows of the comparison in `directory`. Raises `RecordError`."""
    comparison = read_comparison(directory)
    unfinished, best = None, winner(comparison)
    if comparison.status != "finished":
        unfinished = (
            f"This comparison is {comparison.status}: the page shows what had been measured when it"
            " was written."
        )
    return PageContent(
        title=f"{comparison.task} on {count_workers(comparison.workers)}",
        verdict=comparison.verdict,
        winner=best.label if best is not None else None,
        findings=comparison.findings,
        unfinished=unfinished,
        created_at=comparison.created_at,
        metric_name=words(comparison.metric_name),
        metric_better=Better.HIGHER if comparison.higher_is_better else Better.LOWER,
        target=comparison.target,
        strategies=[_strategy(directory, compared) for compared in comparison.strategies],
        differences=comparison.differences,
        cluster=comparison.cluster,
        emulation=comparison.emulation,
        details=[
            ("task", comparison.task),
            *rows(comparison.task_options),
            ("workers", str(comparison.workers)),
            ("parameters", f"{comparison.num_parameters:,}"),
            ("steps", f"{comparison.steps:,}"),
            ("seeds", write_option(comparison.seeds)),
        ],
        environment=rows(comparison.environment),
        command=comparison.command,
    )


def _strategy(directory: Path, compared: ComparedStrategy) -> StrategyResults:
    runs, missing = [], []
    for name in compared.runs:
        try:
            record = Record(directory / name)
            runs.append(read_run(record, name=name))
            missing += [f"{name}: {remark}" for remark in incomplete_means(record)]
        except RecordError as error:
            missing.append(f"the charts leave out {name}: {error}")
    return StrategyResults(
        label=compared.label,
        strategy=compared.strategy,
        options=compared.options,
        summary=compared.summary,
        runs=[run for run in runs if run.steps.num_steps],
        measures={str(name): measured for name, measured in compared.measures.items()},
        notices=[*compared.notices, *missing],
        failure=compared.failure,
    )


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
    details = [
        ("task" if config.script is None else "script", config.task),
        *rows(config.task_options),
        ("batch shares", "/".join(f"{share:g}" for share in config.batch_shares)),
        ("workers", str(config.workers)),
        ("steps", "" if config.steps is None else f"{config.steps:,}"),
        ("epochs", "" if config.epochs is None else f"{config.epochs:,}"),
        ("seed", str(config.seed) if config.script is None else ""),
        *([] if summary is None else _ends(summary)),
    ]
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
        strategies=[
            StrategyResults(
                label=config.strategy,
                strategy=config.strategy,
                options=config.strategy_options,
                runs=[run] if run.steps.num_steps else [],
                measures=measures,
                notices=[*(summary.notices if summary else []), *incomplete_means(record)],
            )
        ],
        cluster=cluster_of(config),
        emulation=record.emulation,
        details=[(name, text) for name, text in details if text],
        environment=rows(record.head.environment),
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


def _ends(summary: Summary) -> list[tuple[str, str]]:
    """What is known of a run when it has ended, by name; some of it may be empty."""
    age = summary.mean_entry_age
    return [
        ("parameters", f"{summary.num_parameters:,}"),
        ("replicas at the end", "identical" if summary.replicas_identical else "differ"),
        ("skipped steps", f"{summary.skipped_steps:,}"),
        ("steps from one sending of an entry to the next", "" if age is None else f"{age:.3g}"),
        ("workers that died", _losses(summary)),
    ]


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
            "bytes_per_step": steps.per_step(steps.bytes_sent),
            "messages_per_step": steps.per_step(steps.messages_sent),
            **{f"share_{phase}": share for phase, share in steps.settled().shares().items()},
        }
    if summary is not None:
        found |= {
            "final_metric": summary.metric,
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
    options = {
        "--task": config.task,
        "--strategy": config.strategy,
        "--workers": config.workers,
        "--steps": config.steps,
        "--epochs": config.epochs,
        "--seed": config.seed,
        "--eval-every": config.eval_every,
        "--cluster": None if config.cluster is None else "cluster.toml",
        "--emulation": None if config.emulation == "auto" else config.emulation,
    }
    words = ["offbeat", "train"]
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    for name, value in config.task_options.items():
        words += ["--set", f"{name}={_typed(value)}"] if value is not None else []
    for name, value in config.strategy_options.items():
        words += ["--set", f"{name}={_typed(value)}"]
    if config.batch_shares:
        words += ["--set", f"{BATCH_SHARES}={'/'.join(map(_typed, config.batch_shares))}"]
    return shlex.join(words)


def _command_of_script(config: RunConfig, script: ScriptCommand) -> str:
    options = [f"{name}={_typed(value)}" for name, value in config.strategy_options.items()]
    words = ["offbeat", "run", "--strategy", ":".join([config.strategy, *options])]
    words += ["--workers", str(config.workers)]
    words += ["--steps", str(config.steps)] if config.steps is not None else []
    words += ["--metric", script.metric] if script.metric is not None else []
    words += ["--module"] if script.as_module else []
    return shlex.join([*words, script.path, *script.arguments])


def _typed(value: object) -> str:
    """As a command line takes it."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
