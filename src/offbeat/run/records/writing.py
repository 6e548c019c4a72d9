"""Writes a record, of which nothing that was there before is lost."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch

from offbeat.callbacks.profile import StepProfile
from offbeat.errors import RecordError
from offbeat.run.config import RunConfig
from offbeat.run.records.layout import (
    CONFIG,
    EVALUATIONS,
    EVENT_FIELDS,
    EVENTS_KIND,
    MEGA_BATCHES,
    RUN_KIND,
    SCHEMA,
    SUMMARY,
    Attempt,
    EmulationReport,
    Evaluation,
    MegaBatch,
    RunHead,
    StepEvent,
    Summary,
    WorkerLoss,
    events_path,
    profile_path,
)
from offbeat.run.records.reading import RunDirectory, read_head, tail

_WRITE_EVERY_S: Final = 0.1


class EventWriter:
    """Appends one rank's events, a few times a second: a worker that is killed loses at most the
    last tenth of a second.

    Args:
        run_directory: of the run.
        rank: whose file it is.
        attempt: number of the attempt, from 0.
        start_step: where a worker that came back goes on; None for others.
        amendable: whether the newest event is kept back until the next one, so that its loss may
            still be said.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        rank: int,
        attempt: int,
        start_step: int | None = None,
        amendable: bool = False,
    ) -> None:
        self._num_kept = int(amendable)
        path = events_path(run_directory, rank)
        torn = _is_torn(path)
        self._run_directory = run_directory
        self._path = path
        with naming_failed_file(path):
            self._file: IO[str] = path.open("a", encoding="utf-8")
        self._waiting: list[StepEvent] = []
        self._written_s = 0.0
        if torn:
            self._file.write("\n")
        offset_s = time.time() - time.monotonic()
        head = {
            "kind": EVENTS_KIND,
            "schema_version": SCHEMA,
            "rank": rank,
            "attempt": attempt,
            "start_step": start_step,
        }
        self._file.write(
            json.dumps(
                head
                | {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "monotonic_to_unix_s": offset_s,
                }
            )
            + "\n"
        )

    def add(self, event: StepEvent) -> None:
        self._waiting.append(event)
        end_s = event.began_s + event.duration_s
        if (
            end_s - self._written_s >= _WRITE_EVERY_S
        ):  # several at once cost a fraction of as many one by one
            self._written_s = end_s
            self._write()

    def amend_loss(self, loss: float) -> None:
        """The loss of the newest event, where events are amendable."""
        if self._waiting and self._num_kept:
            self._waiting[-1] = replace(self._waiting[-1], loss=loss)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append to the run's evaluations, which one rank writes."""
        _append(self._run_directory / EVALUATIONS, evaluation)

    def add_mega_batch(self, mega_batch: MegaBatch) -> None:
        """Append to the run's mega-batches, which one rank writes."""
        _append(self._run_directory / MEGA_BATCHES, mega_batch)

    def close(self) -> None:
        self._num_kept = 0
        try:
            self._write()
        finally:
            with naming_failed_file(self._path):
                self._file.close()

    def _write(self) -> None:
        finished = self._waiting[: len(self._waiting) - self._num_kept]
        lines = [
            json.dumps({name: getattr(event, name) for name in EVENT_FIELDS}) + "\n"
            for event in finished
        ]
        del self._waiting[: len(finished)]
        with naming_failed_file(self._path):
            self._file.write("".join(lines))
            self._file.flush()


class ProfileWriter:
    """Appends one rank's profiles. The file is made with the first one."""

    def __init__(self, run_directory: Path, *, rank: int, attempt: int) -> None:
        self._path = profile_path(run_directory, rank)
        self._attempt = attempt
        self._before = (
            "\n" if self._path.exists() else ""
        )  # the last line of a killed process has no end

    def add(self, step: int, profile: StepProfile) -> None:
        spans = [
            [kind, what, round(began_s, 7), round(ended_s, 7)]
            for kind, what, began_s, ended_s in profile.spans
        ]
        line = {
            "attempt": self._attempt,
            "step": step,
            "spans": spans,
            "duties": [asdict(duty) for duty in profile.assignments],
        }
        with naming_failed_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(self._before + json.dumps(line) + "\n")
        self._before = ""


def create(path: Path | None, config: RunConfig) -> Path:
    """Make the directory of a new run and write its config.json.

    Args:
        path: where; None takes the first free `runs/TASK-STRATEGY-001`, `-002`, ... below the
            working directory.
        config: the resolved run.

    Raises:
        RecordError: `path` exists and is not an empty directory. Nothing in it is touched.
    """
    directory = _first_free(config) if path is None else path
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RecordError(
            f"{directory} {_describe(directory)}; choose another --out{_resume_hint(directory)}"
        )
    head = RunHead(
        kind=RUN_KIND, schema_version=SCHEMA, config=config, attempts=[], environment=environment()
    )
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        _write_head(directory, head)
    except OSError as error:
        raise RecordError(
            f"cannot write {directory}: {error.strerror}; choose another --out"
        ) from None
    return directory


def begin_attempt(
    path: Path, config: RunConfig, *, start_step: int, emulation: EmulationReport | None = None
) -> int:
    """Write into config.json that the run starts (again) with `config`; returns the attempt's
    number, from 0.

    The summary of the attempt before is kept as `summary-attempt-N.json`.

    Args:
        path: the run's directory.
        config: of this attempt.
        start_step: 0, or the step of the checkpoint from which the attempt goes on.
        emulation: how the cluster is emulated; None where it is not.
    """
    head = read_head(path)
    if (path / SUMMARY).exists():
        os.replace(path / SUMMARY, path / f"summary-attempt-{len(head.attempts) - 1}.json")
    attempt = Attempt(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        workers=config.workers,
        start_step=start_step,
        emulation=emulation,
    )
    _write_head(path, replace(head, config=config, attempts=[*head.attempts, attempt]))
    return len(head.attempts)


def write_summary(summary: Summary) -> None:
    _write_text(
        Path(summary.run_directory) / SUMMARY, json.dumps(_finite(asdict(summary)), indent=1)
    )


def _finite(value: Any) -> Any:
    """`value` for JSON, which has no number that is not finite: None stands for those."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def add_to_summary(
    path: Path, remarks: Sequence[str], losses: Sequence[WorkerLoss]
) -> Summary | None:
    """Complete the summary of the run in `path` with what its supervisor saw, and return it; None
    where there is none.
    """
    summary = RunDirectory(path).summary()
    if summary is not None and (remarks or losses):
        notices = [*(loss.sentence() for loss in losses), *summary.notices, *remarks]
        summary = replace(summary, notices=notices, losses=list(losses))
        write_summary(summary)
    return summary


def lock(path: Path) -> IO[str]:
    """Claim the run directory for this process until the returned file is closed.

    Raises:
        RecordError: another process is running there.
    """
    with naming_failed_file(path / ".lock"):
        file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RecordError(
            f"another process is running in {path}; wait for it, or end it first"
        ) from None
    return file


def _append(path: Path, line: Evaluation | MegaBatch) -> None:
    torn = _is_torn(path)  # by a leader that died while it wrote
    with naming_failed_file(path), path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(asdict(line)) + "\n")


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    return path.exists() and path.stat().st_size > 0 and not tail(path, 1).endswith(b"\n")


def _first_free(config: RunConfig) -> Path:
    number = 1
    while (path := Path("runs") / f"{config.task}-{config.strategy}-{number:03d}").exists():
        number += 1
    return path


def _describe(path: Path) -> str:
    if not path.is_dir():
        return "is a file"
    return (
        "holds the record of an earlier run"
        if (path / CONFIG).exists()
        else "is not empty and holds no run of offbeat"
    )


def _resume_hint(path: Path) -> str:
    return f", or go on with --resume {path}" if any(path.glob("checkpoint/step-*")) else ""


def environment() -> dict[str, object]:
    """Where and with what this process runs, as a record keeps it."""
    import offbeat  # the facade; only its version is wanted

    versions: dict[str, object] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    return versions | {
        "offbeat": offbeat.__version__,
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def _write_head(path: Path, head: RunHead) -> None:
    _write_text(path / CONFIG, json.dumps(asdict(head), indent=1))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming_failed_file(path):
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, path)
    except RecordError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming_failed_file(path: Path) -> Iterator[None]:
    """Raises `RecordError` where the disk does not take what is written to `path`."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}; make room on its disk, or choose another --out"
        ) from None
