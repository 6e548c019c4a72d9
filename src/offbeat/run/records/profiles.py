"""Few steps of a run, looked at closely: what the strategy did within them and when, and which rank
was to do what.

    RUN/profile-rank-N.jsonl   one line for each such step of rank N

Only strategies that divide work within a step write it: the second-order ones. `docs/records.md`
lists the fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.callbacks.profile import FactorAssignment, Span, StepProfile
from offbeat.codec.json_objects import Count, build
from offbeat.errors import MALFORMED, RecordError
from offbeat.run.records.reading import Record, complete_lines
from offbeat.run.records.writing import naming_failed_file


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


class ProfileWriter:
    """Appends one rank's profiles. The file is made with the first one."""

    def __init__(self, run_directory: Path, *, rank: int, attempt: int) -> None:
        self._path = _path(run_directory, rank)
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
    path = _path(record.path, rank)
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


def _path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"profile-rank-{rank}.jsonl"
