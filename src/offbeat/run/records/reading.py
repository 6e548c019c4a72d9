"""Reads a record: what is torn is passed over, what a resume took back is left out, what is foreign
is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, RecordError
from offbeat.run.config import RunConfig
from offbeat.run.records.layout import (
    CONFIG,
    RUN_KIND,
    SCHEMA,
    SUMMARY,
    Attempt,
    EmulationReport,
    RunHead,
    Summary,
    events_path,
)

M = TypeVar("M")

_MOST: Final = 1 << 53
"""No number is larger but for metrics, losses and channels: arrays hold whole numbers exactly up to
here.
"""

_MOST_CHANNEL: Final = 1 << 63
"""No channel of an arrival is larger; it is a name, with which nothing is computed."""

_MOST_MEASURED: Final = 1e40
"""No metric or loss that is finite is larger; of a run that diverges they come to what float32
holds.
"""

_MEASURED: Final = frozenset(
    {"metric", "loss", "others", "other_metrics", "target", "final_metric"}
)
_ARRIVALS: Final = "arrivals"
_TAIL_BYTES: Final = 100_000


class RunDirectory:
    """A run's directory: what the run is, and how it ended. Its steps are read by `offbeat_lab`."""

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
    def attempts(self) -> Sequence[Attempt]:
        return self._head.attempts

    @property
    def environment(self) -> Mapping[str, object]:
        return self._head.environment

    @property
    def emulation(self) -> EmulationReport | None:
        """What was emulated in the latest attempt, and how; None where nothing was asked for."""
        return self.attempts[-1].emulation if self.attempts else None

    def summary(self) -> Summary | None:
        """How the run ended; None while it runs, or when it was killed."""
        if not (self.path / SUMMARY).exists():
            return None
        try:
            values = json.loads((self.path / SUMMARY).read_bytes())
        except OSError as error:
            raise RecordError(f"cannot read {self.path / SUMMARY}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{self.path / SUMMARY} is damaged: {error}") from None
        check_numbers(values, str(self.path / SUMMARY))
        try:
            return build(Summary, values)
        except MALFORMED as error:
            raise RecordError(f"{self.path / SUMMARY} is damaged at {error}") from None


def last_step(path: Path, rank: int) -> int:
    """The last step that rank `rank` is known to have finished; 0 when there is none. Cheap: reads
    the end of its events.
    """
    events = events_path(path, rank)
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
    check_numbers(content, str(path))
    try:
        return read(content)
    except MALFORMED as error:
        raise RecordError(f"{path} is damaged at {error}") from None


def check_numbers(values: object, where: str) -> None:
    """Refuse numbers that no record holds, so that nothing that is computed from others overflows.

    Args:
        values: from JSON.
        where: they come from, for the message.

    Raises:
        RecordError: it names the field.
    """
    pending: list[tuple[str, str, object]] = [("", "", values)]  # the second: what it is part of
    while pending:
        name, of, value = pending.pop()
        if isinstance(value, dict):
            pending += (
                (
                    f"{name}.{key}" if name else str(key),
                    key if key in _MEASURED or key == _ARRIVALS else of,
                    item,
                )
                for key, item in value.items()
            )
        elif isinstance(value, list):
            pending += ((f"{name}.{place}", of, item) for place, item in enumerate(value))
        elif isinstance(value, int | float) and not _fits(of, value):
            raise RecordError(
                f"{where} is damaged at {name}: {value!r:.30} is no number that a record holds"
            )


def _fits(of: str, value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= (_MOST_CHANNEL if of == _ARRIVALS else _MOST)
    if of in _MEASURED:
        return not math.isfinite(value) or abs(value) <= _MOST_MEASURED
    return abs(value) <= _MOST
