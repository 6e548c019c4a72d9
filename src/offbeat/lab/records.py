"""Run records: what a run leaves behind, and the only thing that reports and comparisons read.

    RUN/config.json            what was asked for, resolved; where and with what it ran; one entry for each attempt
    RUN/events-rank-N.jsonl    one line for each step of rank N
    RUN/summary.json           how it ended
    RUN/checkpoint/            see `offbeat.checkpoint`
    RUN/logs/rank-N.log        what the worker printed

`docs/records.md` lists every field. Files are added to or replaced whole, never cut: after a resume the steps that were lost
stay in the file, and the reader leaves them out.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import numpy as np
import pydantic
import torch
from pydantic import BaseModel, ConfigDict

from offbeat.checkpoint import Json
from offbeat.errors import RecordError
from offbeat.lab.config import RunConfig
from offbeat.transport.wrappers import Arrival

SCHEMA = 1
"""Version of the layout. A reader refuses a newer one."""

_KIND = "offbeat run"
_TAIL_BYTES = 100_000
_CONFIG = "config.json"
_SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank. Durations in seconds.

    Attributes:
        step: counted from 1.
        loss: of this rank's batch; None when it is not finite.
        batch_size: samples in it.
        compute_s: the step's wall time less `encode_s` and `wait_s`.
        encode_s: selection, compression and decoding.
        wait_s: blocked on other ranks.
        bytes_sent: handed to the network.
        skipped: whether some rank's gradient was not finite, so that nobody applied the step.
        arrivals: when this rank came to each collective.
    """

    step: int
    loss: float | None
    batch_size: int
    compute_s: float
    encode_s: float
    wait_s: float
    bytes_sent: int
    skipped: bool
    arrivals: Sequence[Arrival] = ()


_EVENT = pydantic.TypeAdapter(StepEvent)


class Summary(BaseModel):
    """How a run ended. The fields are described in docs/records.md."""

    model_config = ConfigDict(frozen=True)

    status: str
    task: str
    strategy: str
    workers: int
    world_size: int
    steps: int
    metric: float | None
    metric_name: str
    loss: float | None
    seconds: float
    steps_per_s: float
    bytes_sent_per_step: float
    skipped_steps: int
    num_parameters: int
    parameters_sha256: str
    replicas_identical: bool
    resumed_from_step: int | None
    notices: list[str]
    run_directory: str


class Attempt(BaseModel):
    """One start of the run: the first, or a resume."""

    model_config = ConfigDict(frozen=True)

    started_at: str
    workers: int
    start_step: int


class _Head(BaseModel):
    """The contents of config.json."""

    model_config = ConfigDict(frozen=True)

    kind: str
    schema_version: int
    config: RunConfig
    attempts: list[Attempt]
    environment: dict[str, Json]


class Record:
    """A run's directory, open for reading."""

    def __init__(self, path: Path) -> None:
        """Open the record at `path`. Raises `RecordError` when there is none, or one of a newer schema."""
        self.path = path
        self._head = _read_head(path)

    @property
    def config(self) -> RunConfig:
        return self._head.config

    @property
    def attempts(self) -> list[Attempt]:
        return self._head.attempts

    @property
    def environment(self) -> dict[str, Json]:
        return self._head.environment

    @property
    def checkpoint_root(self) -> Path:
        return self.path / "checkpoint"

    def summary(self) -> Summary | None:
        """How the run ended; None while it runs, or when it was killed."""
        if not (self.path / _SUMMARY).exists():
            return None
        try:
            return Summary.model_validate_json((self.path / _SUMMARY).read_bytes())
        except pydantic.ValidationError as error:
            raise RecordError(f"{self.path / _SUMMARY} is damaged: {error.errors()[0]['msg']}") from None

    def events(self, rank: int) -> Iterator[StepEvent]:
        """Rank `rank`'s steps in order, without those that a resume took back.

        Raises:
            RecordError: a line that is not one of an event file.
        """
        path = self.path / f"events-rank-{rank}.jsonl"
        for attempt, values in _lines(path):
            later = [other.start_step for other in self.attempts[attempt + 1 :]]
            try:
                event = _EVENT.validate_python(values)
            except pydantic.ValidationError as error:
                raise RecordError(f"{path} holds a line that is no event: {error.errors()[0]['msg']}") from None
            if all(event.step <= start_step for start_step in later):
                yield event


class EventWriter:
    """Appends one rank's events. Each line reaches the file at once, so a killed worker loses none that it finished."""

    def __init__(self, run_directory: Path, *, rank: int, attempt: int) -> None:
        path = run_directory / f"events-rank-{rank}.jsonl"
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")
        offset_s = time.time() - time.monotonic()
        head = {"kind": "offbeat events", "schema_version": SCHEMA, "rank": rank, "attempt": attempt}
        self._file.write(
            json.dumps(head | {"host": socket.gethostname(), "pid": os.getpid(), "monotonic_to_unix_s": offset_s}) + "\n"
        )

    def add(self, event: StepEvent) -> None:
        self._file.write(json.dumps(asdict(event)) + "\n")

    def close(self) -> None:
        self._file.close()


def create(path: Path | None, config: RunConfig) -> Path:
    """Make the directory of a new run and write its config.json.

    Args:
        path: where; None takes the first free `runs/TASK-STRATEGY-001`, `-002`, ... below the working directory.
        config: the resolved run.

    Raises:
        RecordError: `path` exists and is not an empty directory. Nothing in it is touched.
    """
    directory = _first_free(config) if path is None else path
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RecordError(f"{directory} {_describe(directory)}; choose another --out{_resume_hint(directory)}")
    head = _Head(kind=_KIND, schema_version=SCHEMA, config=config, attempts=[], environment=_environment())
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        _write_head(directory, head)
    except OSError as error:
        raise RecordError(f"cannot write {directory}: {error.strerror}; choose another --out") from None
    return directory


def begin_attempt(path: Path, config: RunConfig, *, start_step: int) -> int:
    """Note in config.json that the run starts (again) with `config`; returns the attempt's number, from 0.

    The summary of the attempt before is kept as `summary-attempt-N.json`.
    """
    head = _read_head(path)
    if (path / _SUMMARY).exists():
        os.replace(path / _SUMMARY, path / f"summary-attempt-{len(head.attempts) - 1}.json")
    attempt = Attempt(started_at=datetime.now(UTC).isoformat(timespec="seconds"), workers=config.workers, start_step=start_step)
    _write_head(path, head.model_copy(update={"config": config, "attempts": [*head.attempts, attempt]}))
    return len(head.attempts)


def last_step(path: Path, rank: int) -> int:
    """The last step that rank `rank` is known to have finished; 0 when there is none. Cheap: reads the end of its events."""
    events = path / f"events-rank-{rank}.jsonl"
    if not events.exists():
        return 0
    with events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - _TAIL_BYTES))
        steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def write_summary(summary: Summary) -> None:
    _write_text(Path(summary.run_directory) / _SUMMARY, summary.model_dump_json(indent=1))


def lock(path: Path) -> IO[str]:
    """Claim the run directory for this process until the returned file is closed.

    Raises:
        RecordError: another process is running there.
    """
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RecordError(f"another process is running in {path}; wait for it, or end it first") from None
    return file


def _first_free(config: RunConfig) -> Path:
    number = 1
    while (path := Path("runs") / f"{config.task}-{config.strategy}-{number:03d}").exists():
        number += 1
    return path


def _describe(path: Path) -> str:
    if not path.is_dir():
        return "is a file"
    return "holds the record of an earlier run" if (path / _CONFIG).exists() else "is not empty and holds no run of offbeat"


def _resume_hint(path: Path) -> str:
    return f", or go on with --resume {path}" if any(path.glob("checkpoint/step-*")) else ""


def _environment() -> dict[str, Json]:
    import offbeat  # the facade; only its version is wanted

    versions: dict[str, Json] = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return versions | {"offbeat": offbeat.__version__, "platform": platform.platform(), "num_cpus": os.cpu_count()}


def _read_head(path: Path) -> _Head:
    try:
        content = json.loads((path / _CONFIG).read_bytes())
    except (OSError, ValueError):
        raise RecordError(f"{path} holds no run record; give the directory that offbeat train printed") from None
    if not isinstance(content, Mapping) or content.get("kind") != _KIND:
        raise RecordError(f"{path / _CONFIG} was not written by offbeat; give the directory that offbeat train printed")
    if content.get("schema_version") != SCHEMA:
        raise RecordError(
            f"{path} has record schema {content.get('schema_version')!r}, this version reads {SCHEMA}; "
            "use the version of offbeat that wrote it"
        )
    try:
        return _Head.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{path / _CONFIG} is damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _write_head(path: Path, head: _Head) -> None:
    _write_text(path / _CONFIG, head.model_dump_json(indent=1))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(attempt, values) of every event line. A line torn by a kill can only be the last of its attempt."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    attempt, torn = -1, False
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            values = json.loads(line)
        except ValueError:
            torn = True
            continue
        if values.get("kind") == "offbeat events":
            attempt, torn = values["attempt"], False
            continue
        if torn or attempt < 0:
            raise RecordError(f"{path} is damaged near line {number}")
        yield attempt, values
