"""Run records: what a run leaves behind, and the only thing that reports and comparisons read.

    RUN/config.json            what was asked for, resolved; where and with what it ran; one entry for each attempt
    RUN/events-rank-N.jsonl    one line for each step of rank N
    RUN/evaluations.jsonl      the metric as it was measured on the way
    RUN/mega-batches.jsonl     who did how much between merges, where samples are claimed
    RUN/summary.json           how it ended
    RUN/checkpoint/            see `offbeat.checkpoint`
    RUN/logs/rank-N.log        what the worker printed

`docs/records.md` lists every field. Files are added to or replaced whole, never cut: after a resume the steps that were lost
stay in the file, and the reader leaves them out.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import pydantic
import torch
from pydantic import BaseModel, ConfigDict

from offbeat.checkpoint import Json
from offbeat.errors import RecordError
from offbeat.lab.config import RunConfig
from offbeat.lab.emulation import EmulationReport
from offbeat.transport.wrappers import Arrival

M = TypeVar("M", bound=BaseModel)
L = TypeVar("L", "Evaluation", "MegaBatch")

SCHEMA = 2
"""Version of the layout. A reader refuses a newer one."""

_KIND = "offbeat run"
_TAIL_BYTES = 100_000
_WRITE_EVERY_S = 0.1
_CONFIG = "config.json"
_SUMMARY = "summary.json"
_EVALUATIONS = "evaluations.jsonl"
_MEGA_BATCHES = "mega-batches.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank. Durations in seconds, times on the host's monotonic clock.

    Attributes:
        step: counted from 1.
        loss: of this rank's batch; None when it is not finite.
        batch_size: samples in it.
        began_s: when the step began.
        ready_s: when this rank first stood still for others; None if it never did.
        duration_s: of the whole step: `compute_s`, `encode_s` and `wait_s` together.
        compute_s: all of the step but `encode_s` and `wait_s`.
        encode_s: selection, compression and decoding.
        wait_s: blocked on other ranks.
        padded_s: the part of `compute_s` that was slept, for emulated compute and straggling.
        bytes_sent: handed to the network.
        messages_sent: likewise.
        skipped: whether some rank's gradient was not finite, so that nobody applied the step.
        arrivals: when this rank came to each collective.
    """

    step: int
    loss: float | None
    batch_size: int
    began_s: float
    ready_s: float | None
    duration_s: float
    compute_s: float
    encode_s: float
    wait_s: float
    padded_s: float
    bytes_sent: int
    messages_sent: int
    skipped: bool
    arrivals: Sequence[Arrival] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metric, measured by the rank that leads: 0, and once that is gone the next one. It pauses meanwhile.

    Attributes:
        step: steps done.
        seconds: training time so far, without measuring and checkpoints, over all attempts.
        bytes_sent: by that rank so far, over all attempts.
        metric: its value.
        at_s: when, on the host's monotonic clock.
        rank: which one leads.
        others: what else the task tells of the model, by name.
    """

    step: int
    seconds: float
    bytes_sent: int
    metric: float
    at_s: float
    rank: int = 0
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank did in a mega-batch.

    Attributes:
        rank: which one.
        batch_size: samples that it claimed at a time.
        updates: optimizer steps that it took.
        samples: that it computed with.
        weight: of its model in the merge; they sum to 1.
        computing_s: from each claim to the next, claiming and emulated compute included.
        idle_s: from when it found nothing left until the last rank did.
        claims: in order, each a list of (begin, end) in the epoch's order of samples.
    """

    rank: int
    batch_size: int
    updates: int
    samples: int
    weight: float
    computing_s: float
    idle_s: float
    claims: Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatch:
    """Samples that all ranks shared, and the merge after them, as the rank that leads saw it.

    Attributes:
        number: of the run, counted from 1.
        epoch: of its samples, counted from 0.
        step: steps done with it.
        seconds: training time so far, as in `Evaluation`.
        at_s: when the merge was over, on the host's monotonic clock.
        duration_s: from the merge before to the end of this one.
        merge_s: the last part of it, from when all ranks had come.
        by_rank: of those that took part.
    """

    number: int
    epoch: int
    step: int
    seconds: float
    at_s: float
    duration_s: float
    merge_s: float
    by_rank: Sequence[Share]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line of one rank's events of one attempt.

    Attributes:
        attempt: counted from 0.
        host, pid: where the rank ran.
        monotonic_to_unix_s: what to add to a time to compare hosts.
        start_step: the step from which a worker that came back goes on; None for one that was there from the beginning.
    """

    attempt: int
    host: str
    pid: int
    monotonic_to_unix_s: float
    start_step: int | None = None


_EVENT = pydantic.TypeAdapter(StepEvent)
_EVALUATION = pydantic.TypeAdapter(Evaluation)
_MEGA_BATCH = pydantic.TypeAdapter(MegaBatch)
_EVENT_FIELDS = tuple(field.name for field in fields(StepEvent))
_HEAD_FIELDS = tuple(field.name for field in fields(Head))
_HEAD = "offbeat events"


class Loss(BaseModel):
    """A worker that died while the others went on.

    Attributes:
        rank: which one.
        step: the last step that it has recorded.
        seconds: training time when it was missed.
        cause: how it ended.
        num_left, num_workers: how many went on, of how many.
        returned_step, returned_s: after which step, and at what training time, it was back; None if it never was.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    step: int
    seconds: float
    cause: str
    num_left: int
    num_workers: int
    returned_step: int | None = None
    returned_s: float | None = None

    def sentence(self) -> str:
        """For people."""
        what = f"worker {self.rank} died after step {self.step} ({self.cause}); {self.num_left} of {self.num_workers} went on"
        return what if self.returned_step is None else f"{what}; it was back after step {self.returned_step}"


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
    higher_is_better: bool
    other_metrics: dict[str, float] = {}
    loss: float | None
    seconds: float
    steps_per_s: float
    samples_per_s: float
    bytes_sent_per_step: float
    messages_sent_per_step: float
    peak_memory_bytes: list[int]
    skipped_steps: int
    num_parameters: int
    parameters_sha256: str
    replicas_identical: bool
    resumed_from_step: int | None
    notices: list[str]
    losses: list[Loss] = []
    run_directory: str


class Attempt(BaseModel):
    """One start of the run: the first, or a resume."""

    model_config = ConfigDict(frozen=True)

    started_at: str
    workers: int
    start_step: int
    emulation: EmulationReport | None = None


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
    def emulation(self) -> EmulationReport | None:
        """What was emulated in the latest attempt, and how; None where nothing was asked for."""
        return self.attempts[-1].emulation if self.attempts else None

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

        Nor those of a worker that died, past the step at which it came back: it has done them again.

        Raises:
            RecordError: a line that is not one of an event file.
        """
        path = self.path / f"events-rank-{rank}.jsonl"
        limits = self._limits(rank)
        for place, values in _lines(path):
            try:
                event = _EVENT.validate_python(values)
            except pydantic.ValidationError as error:
                raise RecordError(f"{path} holds a line that is no event: {error.errors()[0]['msg']}") from None
            if event.step <= limits[place]:
                yield event

    def _limits(self, rank: int) -> list[float]:
        """For each process that had the rank, the last of its steps that counts: those after it were done again later."""
        heads = self.heads(rank)
        return [
            min(
                (
                    start
                    for start in (
                        *(later.start_step for later in self.attempts[head.attempt + 1 :]),
                        *(later.start_step for later in heads[place + 1 :] if later.attempt == head.attempt),
                    )
                    if start is not None
                ),
                default=math.inf,
            )
            for place, head in enumerate(heads)
        ]

    def heads(self, rank: int) -> list[Head]:
        """Where rank `rank` ran, for each attempt it took part in and each time it came back."""
        lines = (line for _, line in _complete_lines(self.path / f"events-rank-{rank}.jsonl", having=_HEAD) if _is_head(line))
        return [Head(**{name: line[name] for name in _HEAD_FIELDS if name in line}) for line in lines]  # type: ignore[arg-type]

    def evaluations(self) -> list[Evaluation]:
        """The metric on the way, in order of steps, without what a resume took back.

        Raises:
            RecordError: a line that is no evaluation.
        """
        return _by_steps(self.path / _EVALUATIONS, _EVALUATION, "evaluation")

    def mega_batches(self) -> list[MegaBatch]:
        """In order, without what a resume took back; empty where ranks have batches of their own.

        Raises:
            RecordError: a line that is no mega-batch.
        """
        return _by_steps(self.path / _MEGA_BATCHES, _MEGA_BATCH, "mega-batch")


class EventWriter:
    """Appends one rank's events, a few times a second: a worker that is killed loses at most the last tenth of a second."""

    def __init__(self, run_directory: Path, *, rank: int, attempt: int, start_step: int | None = None) -> None:
        """Open the file of `rank` and begin its part of `attempt`; `start_step` is where a worker that came back goes on."""
        path = run_directory / f"events-rank-{rank}.jsonl"
        torn = _is_torn(path)
        self._run_directory = run_directory
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._waiting: list[StepEvent] = []
        self._written_s = 0.0
        if torn:
            self._file.write("\n")
        offset_s = time.time() - time.monotonic()
        head = {"kind": _HEAD, "schema_version": SCHEMA, "rank": rank, "attempt": attempt, "start_step": start_step}
        self._file.write(
            json.dumps(head | {"host": socket.gethostname(), "pid": os.getpid(), "monotonic_to_unix_s": offset_s}) + "\n"
        )

    def add(self, event: StepEvent) -> None:
        self._waiting.append(event)
        end_s = event.began_s + event.duration_s
        if end_s - self._written_s >= _WRITE_EVERY_S:  # several at once cost a fraction of as many one by one
            self._written_s = end_s
            self._write()

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append to the run's evaluations, which one rank writes."""
        _append(self._run_directory / _EVALUATIONS, evaluation)

    def add_mega_batch(self, mega_batch: MegaBatch) -> None:
        """Append to the run's mega-batches, which one rank writes."""
        _append(self._run_directory / _MEGA_BATCHES, mega_batch)

    def close(self) -> None:
        self._write()
        self._file.close()

    def _write(self) -> None:
        lines = [json.dumps({name: getattr(event, name) for name in _EVENT_FIELDS}) + "\n" for event in self._waiting]
        self._waiting.clear()
        self._file.write("".join(lines))
        self._file.flush()


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
    head = _Head(kind=_KIND, schema_version=SCHEMA, config=config, attempts=[], environment=environment())
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        _write_head(directory, head)
    except OSError as error:
        raise RecordError(f"cannot write {directory}: {error.strerror}; choose another --out") from None
    return directory


def begin_attempt(path: Path, config: RunConfig, *, start_step: int, emulation: EmulationReport | None = None) -> int:
    """Note in config.json that the run starts (again) with `config`; returns the attempt's number, from 0.

    The summary of the attempt before is kept as `summary-attempt-N.json`.
    """
    head = _read_head(path)
    if (path / _SUMMARY).exists():
        os.replace(path / _SUMMARY, path / f"summary-attempt-{len(head.attempts) - 1}.json")
    attempt = Attempt(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        workers=config.workers,
        start_step=start_step,
        emulation=emulation,
    )
    _write_head(path, head.model_copy(update={"config": config, "attempts": [*head.attempts, attempt]}))
    return len(head.attempts)


def last_step(path: Path, rank: int) -> int:
    """The last step that rank `rank` is known to have finished; 0 when there is none. Cheap: reads the end of its events."""
    events = path / f"events-rank-{rank}.jsonl"
    steps = re.findall(rb'^{"step": (\d+),', _tail(events, _TAIL_BYTES), re.MULTILINE) if events.exists() else []
    return int(steps[-1]) if steps else 0


def _tail(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    return path.exists() and path.stat().st_size > 0 and not _tail(path, 1).endswith(b"\n")


def write_summary(summary: Summary) -> None:
    _write_text(Path(summary.run_directory) / _SUMMARY, summary.model_dump_json(indent=1))


def add_to_summary(path: Path, remarks: Sequence[str], losses: Sequence[Loss]) -> Summary | None:
    """Complete the summary of the run in `path` with what its supervisor saw, and return it; None where there is none."""
    summary = Record(path).summary()
    if summary is not None and (remarks or losses):
        notices = [*(loss.sentence() for loss in losses), *summary.notices, *remarks]
        summary = summary.model_copy(update={"notices": notices, "losses": list(losses)})
        write_summary(summary)
    return summary


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


def environment() -> dict[str, Json]:
    """Where and with what this process runs, as a record keeps it."""
    import offbeat  # the facade; only its version is wanted

    versions: dict[str, Json] = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return versions | {"offbeat": offbeat.__version__, "platform": platform.platform(), "num_cpus": os.cpu_count()}


def _read_head(path: Path) -> _Head:
    return read_versioned(path / _CONFIG, _Head, kind=_KIND, schema=SCHEMA, what="run record", command="offbeat train")


def read_versioned(path: Path, model: type[M], *, kind: str, schema: int, what: str, command: str) -> M:
    """The contents of a JSON file that says of itself what it is.

    Args:
        path: of the file.
        model: what it holds.
        kind, schema: what its `kind` and `schema_version` must be.
        what, command: what its directory is, and what makes one, for messages.

    Raises:
        RecordError: there is none, it is foreign, damaged, or of another version.
    """
    directory = path.parent
    try:
        content = json.loads(path.read_bytes())
    except OSError:
        raise RecordError(f"{directory} holds no {what}; give the directory that {command} printed") from None
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}; the {what} cannot be read without it") from None
    if not isinstance(content, Mapping) or content.get("kind") != kind:
        raise RecordError(f"{path} was not written by offbeat; give the directory that {command} printed")
    if content.get("schema_version") != schema:
        raise RecordError(
            f"{directory} has {what} schema {content.get('schema_version')!r}, this version reads {schema}; "
            "use the version of offbeat that wrote it"
        )
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{path} is damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _write_head(path: Path, head: _Head) -> None:
    _write_text(path / _CONFIG, head.model_dump_json(indent=1))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(how many heads come before its own, values) of every event line. A torn line can only be the last before a head."""
    place, last = -1, 0
    for number, values in _complete_lines(path):
        if _is_head(values):
            place += 1
        elif place < 0 or number != last + 1:
            raise RecordError(f"{path} is damaged near line {number}")
        else:
            yield place, values
        last = number


def _append(path: Path, line: Evaluation | MegaBatch) -> None:
    torn = _is_torn(path)  # by a leader that died while it wrote
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(asdict(line)) + "\n")


def _by_steps(path: Path, kind: pydantic.TypeAdapter[L], name: str) -> list[L]:
    """The lines of `path`, which is there or not; a line takes back those of its step and of later ones."""
    found: list[L] = []
    for number, values in _complete_lines(path) if path.exists() else ():
        try:
            line = kind.validate_python(values)
        except pydantic.ValidationError as error:
            raise RecordError(f"{path}, line {number}, is no {name}: {error.errors()[0]['msg']}") from None
        found = [earlier for earlier in found if earlier.step < line.step] + [line]
    return found


def _is_head(values: Mapping[str, object]) -> bool:
    return values.get("kind") == _HEAD


def _complete_lines(path: Path, *, having: str = "") -> Iterator[tuple[int, dict[str, object]]]:
    """(number, values) of every line of JSON that has `having` in it, one at a time; torn ones are passed over."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if having in line:
                    with suppress(ValueError):
                        yield number, json.loads(line)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
