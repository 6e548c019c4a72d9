"""Reads records of runs, for reports, comparisons and predictions: what is torn is passed over,
what a resume took back is left out, what is foreign is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from offbeat.callbacks.profile import FactorAssignment, Span
from offbeat.codec.json_objects import Count, build
from offbeat.errors import MALFORMED, RecordError
from offbeat.run.records import Evaluation, Head, MegaBatch, RunDirectory, StepEvent
from offbeat.run.records.layout import (
    EVALUATIONS,
    EVENTS_KIND,
    HEAD_FIELDS,
    MEGA_BATCHES,
    events_path,
    profile_path,
)
from offbeat.run.records.reading import check_numbers

L = TypeVar("L", Evaluation, MegaBatch)

_MAX_LINE: Final = 1 << 26


class Record(RunDirectory):
    """A run's directory, with what happened in each step."""

    @property
    def checkpoint_root(self) -> Path:
        return self.path / "checkpoint"

    def events(self, rank: int) -> Iterator[StepEvent]:
        """Rank `rank`'s steps in order, without those that a resume took back.

        Nor those of a worker that died, past the step at which it came back: it has done them
        again.

        Raises:
            RecordError: a line that is not one of an event file.
        """
        path = events_path(self.path, rank)
        limits = self._limits(rank)
        for place, values in _lines(path):
            try:
                event = build(StepEvent, values)
            except MALFORMED as error:
                raise RecordError(f"{path} holds a line that is no event at {error}") from None
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
        path = events_path(self.path, rank)
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
        return _by_steps(self.path / EVALUATIONS, Evaluation, "evaluation")

    def mega_batches(self) -> list[MegaBatch]:
        """In order, without what a resume took back; empty where ranks have batches of their own.

        Raises:
            RecordError: a line that is no mega-batch.
        """
        path = self.path / MEGA_BATCHES
        found = _by_steps(path, MegaBatch, "mega-batch")
        # A run that was resumed with fewer workers had ranks that `config` does not know.
        for rank in {share.rank for mega_batch in found for share in mega_batch.by_rank}:
            if not events_path(self.path, rank).exists():
                raise RecordError(
                    f"{path} is damaged at by_rank: it names rank {rank}, which has no events"
                )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """One step of one rank.

    Attributes:
        attempt: of the run, counted from 0.
        step: counted from 1.
        spans: what was done when, on the host's monotonic clock, in order of ends.
        duties: the plan from here on; empty where it is that of before.
    """

    attempt: Count
    step: Count
    spans: Sequence[Span]
    duties: Sequence[FactorAssignment] = ()


def read_profiles(record: Record) -> Mapping[int, Sequence[Profiled]]:
    """By rank, its profiles in order of steps, without those that a resume took back. Ranks without
    any are left out.

    Raises:
        RecordError: a line, other than a torn one at the end of an attempt, is not one of such a
            file.
    """
    found = {rank: list(_profiles_of(record, rank)) for rank in range(record.config.workers)}
    return {rank: profiles for rank, profiles in found.items() if profiles}


def _profiles_of(record: Record, rank: int) -> list[Profiled]:
    path = profile_path(record.path, rank)
    found: dict[int, Profiled] = {}
    for _, values in complete_lines(path) if path.exists() else ():
        try:
            profile = build(Profiled, values)
        except MALFORMED as error:
            raise RecordError(f"{path} holds a line that is no profile: {error}") from None
        if all(
            profile.step <= later.start_step for later in record.attempts[profile.attempt + 1 :]
        ):
            found[profile.step] = profile
    return [found[step] for step in sorted(found)]


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


def _by_steps(path: Path, kind: type[L], name: str) -> list[L]:
    """The lines of `path`, which is there or not; a line takes back those of its step and of later
    ones.
    """
    found: list[L] = []
    for number, values in complete_lines(path) if path.exists() else ():
        try:
            line = build(kind, values)
        except MALFORMED as error:
            raise RecordError(f"{path}, line {number}, is no {name} at {error}") from None
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
