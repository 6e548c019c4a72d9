"""What a worker tells its supervisor while it trains: lines of JSON over a pipe of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, OffbeatError, WireError

PIPE_VARIABLE = "OFFBEAT_PROGRESS_FD"
"""Environment variable with the number of the pipe's descriptor."""

ELAPSED_VARIABLE = "OFFBEAT_ELAPSED_S"
"""Environment variable with the training time at which a worker that comes back was started, in
seconds.
"""

MAX_REPORT_BYTES = 1 << 22
"""Longest line of a report."""

EXIT_STOPPED = 3
"""Exit status of a worker that was asked to stop and wrote a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """How far one worker is.

    Attributes:
        rank: which one.
        pid: its process.
        step: optimizer steps done.
        seconds: training time of this attempt.
        target: steps when it will be finished.
        loss: of its last batch.
        wait_share: fraction of the last steps' time spent waiting for other ranks, 0 to 1.
        bytes_per_step: sent in each of the last steps.
        survives_death: whether the other workers go on if one dies now.
        metric: as measured last; None before that, and on all ranks but the leader.
    """

    rank: int
    pid: int
    step: int
    seconds: float
    target: int
    loss: float
    wait_share: float
    bytes_per_step: float
    survives_death: bool
    metric: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why one worker gave up.

    Attributes:
        rank: which one.
        kind: class of the error.
        message: its text, in one line unless it is offbeat's own.
        has_printed: whether the worker has printed a traceback.
    """

    rank: int
    kind: str
    message: str
    has_printed: bool = True

    @classmethod
    def of(cls, error: BaseException, *, rank: int, has_printed: bool = True) -> Failure:
        """The failure of a worker which `error` ends."""
        kind = type(error).__name__
        message = str(error) if isinstance(error, OffbeatError) else f"{kind}: {_gist(str(error))}"
        return cls(rank=rank, kind=kind, message=message, has_printed=has_printed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """One worker's turn is over: it waits for the next one.

    Attributes:
        rank: which one.
        step: optimizer steps done.
        seconds: training time of this attempt.
        met_s: the last part of it, in which it waited for the others before clocks stop.
        survives_death: as of `WorkerProgress`.
    """

    rank: int
    step: int
    seconds: float
    met_s: float = 0.0
    survives_death: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A worker that came back has taken the model of another one and goes on from there.

    Attributes:
        rank: which one.
        step: after which it goes on.
        counts_anew: whether it is a script that has begun anew and has not asked for that step.
    """

    rank: int
    step: int
    counts_anew: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A notice of the first worker's session that is there before its first step.

    Attributes:
        rank: which one.
        text: the notice.
    """

    rank: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipChange:
    """A worker has died while its peers go on, or has come back.

    Attributes:
        rank: the worker.
        departed: whether it has died; False when it is back.
        text: what happened.
    """

    rank: int
    departed: bool
    text: str


Report: TypeAlias = WorkerProgress | Failure | Paused | Joined | Remark
_KINDS: Final[Mapping[str, type[Report]]] = {
    kind.__name__: kind for kind in (WorkerProgress, Failure, Paused, Joined, Remark)
}
Reporter: TypeAlias = Callable[[Report], None]
Listener: TypeAlias = Callable[[WorkerProgress | MembershipChange], None]
NoticeListener: TypeAlias = Callable[[str], None]


def pipe_reporter() -> Reporter:
    """Writes reports to the pipe that the supervisor opened for this process; drops them when there
    is none.
    """
    descriptor = os.environ.get(PIPE_VARIABLE)
    if descriptor is None:
        return lambda report: None
    number = int(descriptor)
    os.set_inheritable(number, False)

    def write(report: Report) -> None:
        os.write(number, encode(report))

    return write


def encode(report: Report) -> bytes:
    return json.dumps({"report": type(report).__name__, **asdict(report)}).encode() + b"\n"


def decode(line: bytes) -> Report:
    """Inverse of `encode`. Raises `WireError` for a line that is no report."""
    try:
        values = json.loads(line)
        return build(_KINDS[values.pop("report")], values)
    except MALFORMED as error:
        raise WireError(
            f"a worker reported {line[:80]!r} to its supervisor, which is no report; does something"
            f" else in it write to the descriptor {PIPE_VARIABLE}?"
        ) from error


def _gist(text: str) -> str:
    """The line of an error's text that says most; the last one of another process's traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[-1 if "Traceback (most recent call last):" in lines else 0]
