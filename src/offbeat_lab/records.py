"""Reads records of runs, for reports, comparisons and predictions: what is torn is passed over,
what a resume took back is left out, what is foreign is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

from typing_extensions import override

from offbeat.codec.json_objects import Count, build
from offbeat.errors import MALFORMED, RecordError
from offbeat.run.records import (
    CONFIG,
    EVALUATIONS,
    EVENTS_KIND,
    MOST_MEASURED,
    SUMMARY,
    Evaluation,
    Head,
    RunDirectory,
    StepEvent,
    Summary,
    append_line,
    events_path,
)

MEGA_BATCHES: Final = "mega-batches.jsonl"

_MOST: Final = 1 << 53
"""No number is larger but for metrics, losses and channels: arrays hold whole numbers exactly up to
here.
"""

_MOST_CHANNEL: Final = 1 << 63
"""No channel of an arrival is larger; it is a name, with which nothing is computed."""

_MEASURED: Final = frozenset(
    {"metric", "loss", "others", "other_metrics", "target", "final_metric"}
)
_ARRIVALS: Final = "arrivals"
_HEAD_FIELDS: Final = tuple(field.name for field in fields(Head))
_MAX_LINE: Final = 1 << 26

Speeds: TypeAlias = Literal["equal", "quotas", "padded", "sleeping", "ignored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """What a worker's link carried before it was handed out.

    Attributes:
        worker: whose link.
        peer: the worker it sent to; None where there is no other.
        asked_bit_per_s: rate asked for, each way; None where it is not limited.
        sent_bit_per_s, received_bit_per_s: payload, measured both ways at once.
        share: the worse direction over what the links at both its ends allow; None where neither is
            limited.
        round_trip_s: the shortest of a few, to `peer` and back, of a byte while nothing else was
            sent.
        together: whether all workers were sending meanwhile; False where the link keeps its rate
            only by itself.
    """

    worker: Count
    peer: Count | None
    asked_bit_per_s: float | None
    sent_bit_per_s: float
    received_bit_per_s: float
    share: float | None
    round_trip_s: float
    together: bool = True

    @property
    def measured_bit_per_s(self) -> float:
        """The worse of the two directions, which the page shows."""
        return min(self.sent_bit_per_s, self.received_bit_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationReport:
    """What was emulated, and how. It belongs into the record and on the page.

    Attributes:
        kind: by what means the network is emulated.
        network, compute: a sentence each.
        speeds: what makes workers of different speeds: the kernel's quotas, steps padded to a fixed
            time, or workers that sleep after they computed; "equal" where there is no difference,
            "ignored" where no emulation was asked for.
        checks: of each worker's link, by worker; empty where the kernel emulates none.
        notices: what was asked for and could not be emulated, why, and what stands in for it.
    """

    kind: Literal["none", "namespaces", "delaying"]
    network: str
    compute: str
    speeds: Speeds = "equal"
    checks: Sequence[LinkCheck] = field(default_factory=list)
    notices: Sequence[str] = field(default_factory=list)


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

    rank: Count
    batch_size: Count
    updates: Count
    samples: Count
    weight: float
    computing_s: float
    idle_s: float
    claims: Sequence[Sequence[tuple[Count, Count]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatch:
    """Samples that all ranks shared, and the merge after them, as the rank that leads saw it.

    Attributes:
        number: of the run, counted from 1.
        epoch: of its samples, counted from 0.
        step: steps done with it.
        seconds: training time so far, as in `Evaluation`.
        at_s: when the merge was over, or training went on beside it, on the host's monotonic clock.
        duration_s: from the merge before to the end of this one.
        merge_s: the last part of it, from when all ranks had come; of a merge beside training, what
            training stood still for it.
        by_rank: of those that took part.
    """

    number: Count
    epoch: Count
    step: Count
    seconds: float
    at_s: float
    duration_s: float
    merge_s: float
    by_rank: Sequence[Share]


L = TypeVar("L", Evaluation, MegaBatch)


class Record(RunDirectory):
    """A run's directory, with what happened in each step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        check_numbers(asdict(self.head), str(path / CONFIG))
        self.emulation = emulation_of(self)
        """What was emulated in the latest attempt, and how; None where nothing was asked for."""

    @override
    def summary(self) -> Summary | None:
        found = super().summary()
        if found is not None:
            check_numbers(asdict(found), str(self.path / SUMMARY))
        return found

    @property
    def checkpoint_root(self) -> Path:
        return self.path / "checkpoint"

    def events(self, rank: int, *, last_bytes: float = math.inf) -> Iterator[StepEvent]:
        """Rank `rank`'s steps in order, without those that a resume took back.

        Nor those of a worker that died, past the step at which it came back: it has done them
        again.

        Args:
            rank: which one.
            last_bytes: of its file, in which steps are looked for; by default all of it.

        Raises:
            RecordError: a line that is not one of an event file.
        """
        path = events_path(self.path, rank)
        limits = self._limits(rank)
        for place, values in _lines(path, last_bytes):
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
                build(Head, {name: line[name] for name in _HEAD_FIELDS if name in line})
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


def emulation_of(run: RunDirectory) -> EmulationReport | None:
    """What was emulated in the latest attempt of `run`; None where nothing was asked for."""
    found = run.attempts[-1].emulation if run.attempts else None
    try:
        return None if found is None else build(EmulationReport, dict(found))
    except MALFORMED as error:
        raise RecordError(f"{run.path / CONFIG} is damaged at {error}") from None


def add_mega_batch(run: Path, mega_batch: MegaBatch) -> None:
    """Append to the mega-batches of the run in `run`, which one rank writes."""
    append_line(run / MEGA_BATCHES, mega_batch)


def _lines(path: Path, last_bytes: float) -> Iterator[tuple[int, dict[str, object]]]:
    """(how many heads come before its own, values) of every event line. A torn line can only be the
    last before a head.
    """
    place, last = -1, 0
    follows = last_bytes == math.inf  # whether the line before was looked at
    for number, values in complete_lines(path, last_bytes=last_bytes):
        if _is_head(values):
            place += 1
        elif place < 0 or (follows and number != last + 1):
            raise RecordError(f"{path} is damaged near line {number}")
        else:
            yield place, values
            follows = True
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
        while found and found[-1].step >= line.step:
            found.pop()
        found.append(line)
    return found


def _is_head(values: Mapping[str, object]) -> bool:
    return values.get("kind") == EVENTS_KIND


def complete_lines(
    path: Path, *, having: str = "", last_bytes: float = math.inf
) -> Iterator[tuple[int, dict[str, object]]]:
    """(number, values) of every line of JSON that has `having` in it, one at a time; torn ones are
    passed over. Of those before the last `last_bytes` of the file, which take long to parse where a
    run is long, only heads are looked at.
    """
    try:
        begin, read = path.stat().st_size - last_bytes, 0
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), start=1):
                if len(line) == _MAX_LINE:
                    raise RecordError(
                        f"{path}, line {number}, has {_MAX_LINE} characters or more; was it written"
                        " by offbeat?"
                    )
                read += len(line)
                is_wanted = having in line and (read > begin or EVENTS_KIND in line)
                values = _parsed(line) if is_wanted else None
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
        return not math.isfinite(value) or abs(value) <= MOST_MEASURED
    return abs(value) <= _MOST
