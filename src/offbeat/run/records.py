"""Run records: what a run leaves behind. `offbeat_lab.records` reads them for reports, comparisons
and predictions, which read nothing else.

    RUN/config.json            what was asked for, resolved; where and with what it ran; one entry
                               for each attempt
    RUN/events-rank-N.jsonl    one line for each step of rank N
    RUN/evaluations.jsonl      the metric as it was measured on the way
    RUN/mega-batches.jsonl     who did how much between merges, where samples are claimed
    RUN/summary.json           how it ended
    RUN/checkpoint/            of `offbeat_lab.checkpoints`
    RUN/logs/rank-N.log        what the worker printed

`docs/records.md` lists every field. Files are added to or replaced whole, never cut: after a resume
the steps that were lost stay in the file, and the reader leaves them out.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import IO, Any, Final, TypeVar

import numpy as np
import torch

from offbeat.callbacks.callback import Decision
from offbeat.codec.json_objects import Count, build
from offbeat.errors import MALFORMED, RecordError
from offbeat.run.config import RunConfig
from offbeat.session.checkpoint import whole_file
from offbeat.transport.driver import Arrival
from offbeat.transport.host import usable_cores

M = TypeVar("M")

SCHEMA: Final = 2
"""Version of the layout. A reader refuses a newer one."""

RUN_KIND: Final = "offbeat run"
EVENTS_KIND: Final = "offbeat events"
CONFIG: Final = "config.json"
SUMMARY: Final = "summary.json"
EVALUATIONS: Final = "evaluations.jsonl"

MOST_MEASURED: Final = 1e40
"""No metric or loss that is finite is larger: of a run that diverges they come to what float32
holds. What is beyond, as the exponential of a loss of 100, is infinite in a record.
"""

_TAIL_BYTES: Final = 100_000
_WRITE_EVERY_S: Final = 0.1


def as_measured(value: float) -> float:
    """A metric or loss as it stands in a record."""
    return math.copysign(math.inf, value) if abs(value) > MOST_MEASURED else value


def events_path(run: Path, rank: int) -> Path:
    """The file with the steps of `rank`."""
    return run / f"events-rank-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank. Durations in seconds, times on the host's monotonic clock.

    Attributes:
        step: counted from 1.
        loss: of this rank's batch; None when it is not finite.
        batch_size: samples in it.
        began_s: when the step began.
        ready_s: when this rank first waited for peers; None if it never did.
        duration_s: of the whole step: `compute_s`, `encode_s` and `wait_s` together.
        compute_s: all of the step but `encode_s` and `wait_s`.
        encode_s: selection, compression and decoding.
        wait_s: blocked on other ranks.
        padded_s: the part of `compute_s` that was slept, for emulated compute and straggling.
        bytes_sent: handed to the network.
        messages_sent: how many were handed to the network.
        skipped: whether some rank's gradient was not finite, so that no rank applied the step.
        arrivals: when this rank came to each collective.
    """

    step: Count
    loss: float | None
    batch_size: Count
    began_s: float
    ready_s: float | None
    duration_s: float
    compute_s: float
    encode_s: float
    wait_s: float
    padded_s: float
    bytes_sent: Count
    messages_sent: Count
    skipped: bool
    arrivals: Sequence[Arrival] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metric, measured by the rank that leads: 0, and once that is dead the next one. It pauses
    meanwhile.

    Attributes:
        step: steps done.
        seconds: training time so far, without measuring and checkpoints, over all attempts.
        bytes_sent: by that rank so far, over all attempts.
        metric: its value.
        at_s: when, on the host's monotonic clock.
        rank: which one leads.
        others: what else the task tells of the model, by name.
        without: the living ranks whose models the measured mean lacks; empty where it is whole.
    """

    step: Count
    seconds: float
    bytes_sent: Count
    metric: float
    at_s: float
    rank: Count = 0
    others: Mapping[str, float] = field(default_factory=dict)
    without: Sequence[Count] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line of one rank's events of one attempt.

    Attributes:
        attempt: counted from 0.
        host, pid: where the rank ran.
        monotonic_to_unix_s: what to add to a time to compare hosts.
        start_step: the step from which a worker that came back goes on; None for one that was there
            from the beginning.
    """

    attempt: Count
    host: str
    pid: int
    monotonic_to_unix_s: float
    start_step: Count | None = None


EVENT_FIELDS: Final = tuple(field.name for field in fields(StepEvent))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoss:
    """A worker that died while its peers went on.

    Attributes:
        rank: which one.
        step: the last step that it has recorded; it may have done another one or two.
        seconds: training time when it was missed.
        cause: how it ended.
        num_left, num_workers: how many went on, of how many.
        returned_step, returned_s: after which step, and at what training time, it was back; None if
            it never was.
    """

    rank: Count
    step: Count
    seconds: float
    cause: str
    num_left: Count
    num_workers: Count
    returned_step: Count | None = None
    returned_s: float | None = None

    def sentence(self) -> str:
        """The loss in words, for people."""
        what = (
            f"worker {self.rank} died after step {self.step} was recorded ({self.cause});"
            f" {self.num_left} of {self.num_workers} went on"
        )
        if self.returned_step is None:
            return what
        return f"{what}; it was back after step {self.returned_step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a run ended. The fields are described in docs/records.md."""

    status: str
    task: str
    strategy: str
    workers: Count
    world_size: Count
    steps: Count
    metric: float | None
    metric_name: str
    higher_is_better: bool
    other_metrics: Mapping[str, float] = field(default_factory=dict)
    loss: float | None
    seconds: float
    steps_per_s: float
    samples_per_s: float
    bytes_sent_per_step: float
    messages_sent_per_step: float
    peak_memory_bytes: Sequence[Count]
    skipped_steps: Count
    mean_entry_age: float | None = None
    num_parameters: Count
    parameters_sha256: str
    replicas_identical: bool
    resumed_from_step: Count | None
    notices: Sequence[str]
    losses: Sequence[WorkerLoss] = field(default_factory=list)
    decisions: Sequence[Decision] = field(default_factory=list)
    run_directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the run: the first, or a resume. What `offbeat_lab` emulates stands here as
    JSON.
    """

    started_at: str
    workers: Count
    start_step: Count
    emulation: Mapping[str, object] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHead:
    """The contents of config.json."""

    kind: str
    schema_version: int
    config: RunConfig
    attempts: Sequence[Attempt]
    environment: Mapping[str, object]


class RunDirectory:
    """A run's directory: what the run is, and how it ended. Its steps are read by `offbeat_lab`."""

    def __init__(self, path: Path) -> None:
        """Open the record at `path`. Raises `RecordError` when there is none, or one of a newer
        schema.
        """
        self.path = path
        self.head = read_head(path)
        self.config, self.attempts = self.head.config, self.head.attempts

    def summary(self) -> Summary | None:
        """How the run ended; None while it runs, or when it was killed."""
        path = self.path / SUMMARY
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise RecordError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is damaged: {error}") from None
        try:
            return build(Summary, content)
        except MALFORMED as error:
            raise RecordError(f"{path} is damaged at {error}") from None


def last_step(path: Path, rank: int) -> int:
    """The last step that rank `rank` is known to have finished; 0 when there is none. Cheap: reads
    the end of its events.
    """
    if not (events := events_path(path, rank)).exists():
        return 0
    steps = re.findall(rb'^{"step": (\d{1,18}),', tail(events, _TAIL_BYTES), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def tail(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def read_head(path: Path) -> RunHead:
    return read_versioned(
        path / CONFIG,
        lambda content: build(RunHead, content),
        kind=RUN_KIND,
        schema=SCHEMA,
        what="run record",
        command="offbeat train",
    )


def read_versioned(
    path: Path, read: Callable[[object], M], *, kind: str, schema: int, what: str, command: str
) -> M:
    """The contents of a JSON file that says of itself what it is.

    Args:
        path: of the file.
        read: makes what it holds out of JSON; raises `TypeError`, `ValueError` with the place.
        kind, schema: what its `kind` and `schema_version` must be.
        what, command: what its directory is, and what makes one, for messages.

    Raises:
        RecordError: there is none, it is foreign, damaged, or of another version.
    """
    directory = path.parent
    try:
        content = json.loads(path.read_bytes())
    except OSError:
        raise RecordError(
            f"{directory} holds no {what}; give the directory that {command} printed"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path} is damaged: {error}; the {what} cannot be read without it"
        ) from None
    if not isinstance(content, Mapping) or content.get("kind") != kind:
        raise RecordError(
            f"{path} was not written by offbeat; give the directory that {command} printed"
        )
    if content.get("schema_version") != schema:
        raise RecordError(
            f"{directory} has {what} schema {content.get('schema_version')!r}, this version reads"
            f" {schema}; use the version of offbeat that wrote it"
        )
    try:
        return read(content)
    except MALFORMED as error:
        raise RecordError(f"{path} is damaged at {error}") from None


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
        head = Head(
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            monotonic_to_unix_s=time.time() - time.monotonic(),
            start_step=start_step,
        )
        kind = {"kind": EVENTS_KIND, "schema_version": SCHEMA, "rank": rank}
        self._file.write(json.dumps(kind | asdict(head)) + "\n")
        with suppress(OSError):  # a full disk is told with the first event
            self._file.flush()  # whoever watches looks whether the process lives

    def add(self, event: StepEvent) -> None:
        self._waiting.append(event)
        end_s = event.began_s + event.duration_s
        # Several at once cost a fraction of as many one by one.
        if end_s - self._written_s >= _WRITE_EVERY_S:
            self._written_s = end_s
            self._write()

    def amend_loss(self, loss: float) -> None:
        """The loss of the newest event, where events are amendable."""
        if self._waiting and self._num_kept:
            self._waiting[-1] = replace(self._waiting[-1], loss=loss)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append to the run's evaluations, which one rank writes."""
        append_line(self._run_directory / EVALUATIONS, evaluation)

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


def create(path: Path | None, config: RunConfig) -> Path:
    """Make the directory of a new run and write its config.json.

    Args:
        path: where; None takes the first free `runs/TASK-STRATEGY-001`, `-002`, ... below the
            working directory.
        config: the resolved run.

    Raises:
        RecordError: `path` exists and is not an empty directory. Nothing in it is touched.
    """
    directory = _claim_free(f"{config.task}-{config.strategy}") if path is None else path
    check_free(directory)
    head = RunHead(
        kind=RUN_KIND, schema_version=SCHEMA, config=config, attempts=[], environment=environment()
    )
    with naming_failed_file(directory, ELSEWHERE):
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    _write_head(directory, head)
    return directory


def check_free(directory: Path) -> None:
    """Raise `RecordError` unless a record may be written to `directory`. Touches nothing."""
    with naming_failed_file(directory, ELSEWHERE):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise RecordError(
                f"{directory} {_describe(directory)}; choose another --out{_resume_hint(directory)}"
            )


def begin_attempt(path: Path, config: RunConfig, *, start_step: int, emulation: Any = None) -> int:
    """Write into config.json that the run starts (again) with `config`; returns the attempt's
    number, from 0.

    The summary of the attempt before is kept as `summary-attempt-N.json`.

    Args:
        path: the run's directory.
        config: of this attempt.
        start_step: 0, or the step of the checkpoint from which the attempt goes on.
        emulation: a dataclass that says how the cluster is emulated; None where it is not.
    """
    head = read_head(path)
    if (path / SUMMARY).exists():
        os.replace(path / SUMMARY, path / f"summary-attempt-{len(head.attempts) - 1}.json")
    attempt = Attempt(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        workers=config.workers,
        start_step=start_step,
        emulation=None if emulation is None else asdict(emulation),
    )
    _write_head(path, replace(head, config=config, attempts=[*head.attempts, attempt]))
    return len(head.attempts)


def write_summary(summary: Summary) -> None:
    text = json.dumps(_finite(asdict(summary)), indent=1)
    write_whole(Path(summary.run_directory) / SUMMARY, text)


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


def append_line(path: Path, line: Any) -> None:
    """Append a dataclass to a file that one rank writes."""
    torn = _is_torn(path)  # by a leader that died while it wrote
    with naming_failed_file(path), path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(asdict(line)) + "\n")


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    return path.exists() and path.stat().st_size > 0 and not tail(path, 1).endswith(b"\n")


def first_free(name: str) -> Path:
    """The first directory below runs/ of this name and a number that is not there yet."""
    number = 1
    while os.path.lexists(path := Path("runs") / f"{name}-{number:03d}"):
        number += 1
    return path


def _claim_free(name: str) -> Path:
    """`first_free`, made: of runs that begin at once, as on the hosts of one, each has its own."""
    while True:
        path = first_free(name)
        with naming_failed_file(path, ELSEWHERE), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


def _describe(path: Path) -> str:
    if not path.is_dir():
        return "is a file"
    return "holds the record of an earlier run" if (path / CONFIG).exists() else "is not empty"


def _resume_hint(path: Path) -> str:
    has_checkpoints = any(path.glob("checkpoint/step-*"))
    return f", or go on with --resume {quote(str(path))}" if has_checkpoints else ""


def environment() -> dict[str, object]:
    """Where and with what this process runs, as a record keeps it."""
    import offbeat  # the facade; only its version is wanted

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "offbeat": offbeat.__version__,
        "platform": platform.platform(),
        "num_cpus": usable_cores(),
    }


def _write_head(path: Path, head: RunHead) -> None:
    write_whole(path / CONFIG, json.dumps(asdict(head), indent=1))


MORE_ROOM: Final = "make room on its disk, or choose another --out"
ELSEWHERE: Final = "choose another --out"


def write_whole(path: Path, text: str, advice: str = MORE_ROOM) -> None:
    """Write all of `text` to `path`, or leave what is there. Raises `RecordError`."""
    with naming_failed_file(path, advice), whole_file(path) as file:
        file.write(f"{text}\n".encode())


@contextmanager
def naming_failed_file(path: Path, advice: str = MORE_ROOM) -> Iterator[None]:
    """Raises `RecordError` where the disk does not take what is written to `path`."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}; {advice}") from None
