"""Reads a record: what is torn is passed over, what a resume took back is left out, what is foreign
is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import pydantic
from pydantic import BaseModel

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, RecordError
from offbeat.session.checkpoint import Json
from offbeat_lab.config import RunConfig
from offbeat_lab.emulation import EmulationReport
from offbeat_lab.records.layout import (
    CONFIG,
    EVALUATIONS,
    EVENTS_KIND,
    HEAD_FIELDS,
    MEGA_BATCHES,
    RUN_KIND,
    SCHEMA,
    SUMMARY,
    Attempt,
    Evaluation,
    Head,
    MegaBatch,
    RunHead,
    StepEvent,
    Summary,
)

M = TypeVar("M", bound=BaseModel)
L = TypeVar("L", Evaluation, MegaBatch)

_EVENT = pydantic.TypeAdapter(StepEvent)
_EVALUATION = pydantic.TypeAdapter(Evaluation)
_MEGA_BATCH = pydantic.TypeAdapter(MegaBatch)
_MOST: Final = 1 << 53
"""No number is larger but for metrics and losses: arrays hold whole numbers exactly up to here."""

_MOST_MEASURED: Final = 1e40
"""No metric or loss that is finite is larger; of a run that diverges they come to what float32
holds.
"""

_MEASURED: Final = frozenset(
    {"metric", "loss", "others", "other_metrics", "target", "final_metric"}
)
_TAIL_BYTES: Final = 100_000
_MAX_LINE: Final = 1 << 26


class Record:
    """A run's directory, open for reading."""

    def __init__(self, path: Path) -> None:
        """Open the record at `path`. Raises `RecordError` when there is none, or one of a newer
        schema.
        """
        self.path = path
        self._head = read_head(path)

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
        if not (self.path / SUMMARY).exists():
            return None
        try:
            values = json.loads((self.path / SUMMARY).read_bytes())
            check_numbers(values, str(self.path / SUMMARY))
            return Summary.model_validate(values)
        except OSError as error:
            raise RecordError(f"cannot read {self.path / SUMMARY}: {error.strerror}") from None
        except pydantic.ValidationError as error:
            raise RecordError(f"{self.path / SUMMARY} is damaged{describe(error)}") from None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{self.path / SUMMARY} is damaged: {error}") from None

    def events(self, rank: int) -> Iterator[StepEvent]:
        """Rank `rank`'s steps in order, without those that a resume took back.

        Nor those of a worker that died, past the step at which it came back: it has done them
        again.

        Raises:
            RecordError: a line that is not one of an event file.
        """
        path = self.path / f"events-rank-{rank}.jsonl"
        limits = self._limits(rank)
        for place, values in _lines(path):
            try:
                event = _EVENT.validate_python(values)
            except pydantic.ValidationError as error:
                raise RecordError(
                    f"{path} holds a line that is no event{describe(error)}"
                ) from None
            if event.step <= limits[place]:
                yield event

    def _limits(self, rank: int) -> list[float]:
        """For each process that had the rank, the last of its steps that counts: those after it
        were done again later.
        """
        heads = self.heads(rank)
        return [
            min(
                (
                    start
                    for start in (
                        *(later.start_step for later in self.attempts[head.attempt + 1 :]),
                        *(
                            later.start_step
                            for later in heads[place + 1 :]
                            if later.attempt == head.attempt
                        ),
                    )
                    if start is not None
                ),
                default=math.inf,
            )
            for place, head in enumerate(heads)
        ]

    def heads(self, rank: int) -> list[Head]:
        """Where rank `rank` ran, for each attempt it took part in and each time it came back."""
        path = self.path / f"events-rank-{rank}.jsonl"
        lines = (line for _, line in complete_lines(path, having=EVENTS_KIND) if _is_head(line))
        try:
            return [
                build(Head, {name: line[name] for name in HEAD_FIELDS if name in line})
                for line in lines
            ]
        except MALFORMED as error:
            raise RecordError(
                f"{path} has a first line of an attempt that is none: {error}"
            ) from None

    def evaluations(self) -> list[Evaluation]:
        """The metric on the way, in order of steps, without what a resume took back.

        Raises:
            RecordError: a line that is no evaluation.
        """
        return _by_steps(self.path / EVALUATIONS, _EVALUATION, "evaluation")

    def mega_batches(self) -> list[MegaBatch]:
        """In order, without what a resume took back; empty where ranks have batches of their own.

        Raises:
            RecordError: a line that is no mega-batch.
        """
        path = self.path / MEGA_BATCHES
        # A resume may have fewer workers than the run began with.
        workers = max([self.config.workers, *(attempt.workers for attempt in self.attempts)])
        found = _by_steps(path, _MEGA_BATCH, "mega-batch")
        for share in (share for mega_batch in found for share in mega_batch.by_rank):
            if share.rank >= workers:
                raise RecordError(
                    f"{path} is damaged at by_rank: it names rank {share.rank} of {workers}"
                )
        return found


def last_step(path: Path, rank: int) -> int:
    """The last step that rank `rank` is known to have finished; 0 when there is none. Cheap: reads
    the end of its events.
    """
    events = path / f"events-rank-{rank}.jsonl"
    steps = (
        re.findall(rb'^{"step": (\d{1,18}),', tail(events, _TAIL_BYTES), re.MULTILINE)
        if events.exists()
        else []
    )
    return int(steps[-1]) if steps else 0


def tail(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def read_head(path: Path) -> RunHead:
    return read_versioned(
        path / CONFIG,
        RunHead,
        kind=RUN_KIND,
        schema=SCHEMA,
        what="run record",
        command="offbeat train",
    )


def read_versioned(
    path: Path, model: type[M], *, kind: str, schema: int, what: str, command: str
) -> M:
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
    check_numbers(content, str(path))
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        raise RecordError(f"{path} is damaged{describe(error)}") from None


def describe(error: pydantic.ValidationError) -> str:
    """Where something is wrong, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f" at {'.'.join(map(str, first['loc'])) or 'the top'}: {first['msg']}"


def check_numbers(values: object, where: str) -> None:
    """Refuse numbers that no record holds, so that nothing that is computed from others overflows.

    Args:
        values: from JSON.
        where: they come from, for the message.

    Raises:
        RecordError: it names the field.
    """
    pending: list[tuple[str, bool, object]] = [("", False, values)]
    while pending:
        name, measured, value = pending.pop()
        if isinstance(value, dict):
            pending += (
                (f"{name}.{key}" if name else str(key), measured or key in _MEASURED, item)
                for key, item in value.items()
            )
        elif isinstance(value, list):
            pending += ((f"{name}.{place}", measured, item) for place, item in enumerate(value))
        elif isinstance(value, int | float):
            fits = (
                not math.isfinite(value) or abs(value) <= _MOST_MEASURED
                if measured and isinstance(value, float)
                else abs(value) <= _MOST
            )
            if not fits:
                raise RecordError(
                    f"{where} is damaged at {name}: {value!r:.30} is no number that a record holds"
                )


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(how many heads come before its own, values) of every event line. A torn line can only be the
    last before a head.
    """
    place, last = -1, 0
    for number, values in complete_lines(path):
        if _is_head(values):
            place += 1
        elif place < 0 or number != last + 1:
            raise RecordError(f"{path} is damaged near line {number}")
        else:
            yield place, values
        last = number


def _by_steps(path: Path, kind: pydantic.TypeAdapter[L], name: str) -> list[L]:
    """The lines of `path`, which is there or not; a line takes back those of its step and of later
    ones.
    """
    found: list[L] = []
    for number, values in complete_lines(path) if path.exists() else ():
        try:
            line = kind.validate_python(values)
        except pydantic.ValidationError as error:
            raise RecordError(f"{path}, line {number}, is no {name}{describe(error)}") from None
        found = [earlier for earlier in found if earlier.step < line.step] + [line]
    return found


def _is_head(values: Mapping[str, object]) -> bool:
    return values.get("kind") == EVENTS_KIND


def complete_lines(path: Path, *, having: str = "") -> Iterator[tuple[int, dict[str, object]]]:
    """(number, values) of every line of JSON that has `having` in it, one at a time; torn ones are
    passed over.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), start=1):
                if len(line) == _MAX_LINE:
                    raise RecordError(
                        f"{path}, line {number}, has {_MAX_LINE} characters or more; was it written"
                        " by offbeat?"
                    )
                values = _parsed(line) if having in line else None
                if isinstance(values, dict):
                    check_numbers(values, f"{path}, line {number},")
                    yield number, values
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is no text in UTF-8 ({error.reason}); it is damaged") from None


def _parsed(line: str) -> object:
    """What stands in a line; None where it is torn."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
