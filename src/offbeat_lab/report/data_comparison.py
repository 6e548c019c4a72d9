"""Builds the page's values from a comparison."""

from __future__ import annotations

from pathlib import Path

from offbeat.errors import RecordError
from offbeat_lab.comparison import ComparedStrategy, read_comparison
from offbeat_lab.findings import winner
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
from offbeat_lab.report.style import write_option


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
        contestants=[_contestant(directory, compared) for compared in comparison.contestants],
        differences=comparison.differences,
        setting=setting(comparison.emulation, comparison.cluster),
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


def _contestant(directory: Path, compared: ComparedStrategy) -> StrategyResults:
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
