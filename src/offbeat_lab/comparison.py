"""What a comparison found: `comparison.json`, read and written. `docs/records.md` lists every
field.

OUT/comparison.json        this
OUT/runs/LABEL-seed-S/     one ordinary run record for each strategy and seed
OUT/report.html            the page made of both
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, field_validator

from offbeat.run.records import read_versioned, write_whole
from offbeat_lab.cluster import Cluster
from offbeat_lab.records import EmulationReport, check_numbers
from offbeat_lab.statistics import Estimate, Ratio

SCHEMA = 2
KIND = "offbeat comparison"
FILE = "comparison.json"

Measure = Literal[
    "time_to_target_s",
    "steps_to_target",
    "final_metric",
    "step_s",
    "steps_per_s",
    "samples_per_s",
    "efficiency",
    "bytes_per_step",
    "messages_per_step",
    "share_compute",
    "share_encode",
    "share_wait",
    "share_transfer",
    "peak_memory_bytes",
]
"""What is measured. `figures.MEASURES` says what each is called, and `docs/comparing.md` how
it is measured.
"""


class ComparedStrategy(BaseModel):
    """One strategy with its options.

    Attributes:
        label: unique within the comparison.
        strategy, options, summary: what it is.
        runs: directories of its runs, relative to the comparison's, one for each seed.
        notices: of its runs: fallbacks, choices, what was skipped.
        failure: why it has no result; None if it has one.
        measures: see `Measure`.
        lateness_s: mean lateness of each rank at the exchange, in seconds.
        slow_worker: the rank that is last in most steps, as `offbeat_lab.breakdown` says; None if
            none stands out.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    strategy: str
    options: dict[str, JsonValue]
    summary: str
    runs: list[str]
    notices: list[str] = []
    failure: str | None = None
    measures: dict[Measure, Estimate] = {}
    lateness_s: list[float] = []

    @field_validator("runs")
    @classmethod
    def _inside(cls, runs: list[str]) -> list[str]:
        """A file from elsewhere must not make a reader look at other directories."""
        for run in map(PurePath, runs):
            if run.is_absolute() or ".." in run.parts or "\0" in str(run):
                raise ValueError(f"{str(run)!r} is not a directory below the comparison's")
        return runs

    slow_worker: int | None = None


class Difference(Ratio):
    """How many times larger `measure` is for strategy `a` than for `b`."""

    measure: Measure
    a: str
    b: str


class Comparison(BaseModel):
    """A comparison's file. `verdict` is one sentence, `findings` are a few more."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["offbeat comparison"] = "offbeat comparison"
    schema_version: int = SCHEMA
    status: Literal["running", "finished", "stopped"]
    command: str
    created_at: str
    task: str
    task_options: dict[str, JsonValue]
    metric_name: str
    higher_is_better: bool
    target: float | None
    target_was_given: bool
    seeds: list[int]
    steps: int
    workers: int
    num_parameters: int
    cluster: Cluster
    emulation: EmulationReport
    environment: dict[str, JsonValue]
    strategies: list[ComparedStrategy]
    differences: list[Difference] = []
    verdict: str = ""
    findings: list[str] = []


def is_comparison(directory: Path) -> bool:
    return (directory / FILE).exists()


def read_comparison(directory: Path) -> Comparison:
    """The comparison recorded in `directory`.

    Raises:
        RecordError: there is none, it is damaged, or of a newer version.
    """
    return read_versioned(
        directory / FILE,
        _validated,
        kind=KIND,
        schema=SCHEMA,
        what="comparison",
        command="offbeat compare",
    )


def _validated(content: object) -> Comparison:
    try:
        check_numbers(content, FILE)
        return Comparison.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Replace the comparison's file whole. Raises `RecordError` when the disk does not take it."""
    write_whole(directory / FILE, comparison.model_dump_json(indent=1))
