"""What is said of a worker's process that has ended before its time."""

from __future__ import annotations

import signal
from pathlib import Path

from offbeat.run.progress import Failure
from offbeat.run.records import last_step


def cause(code: int, failure: Failure | None) -> str:
    """Why a process ended, in a few words: `code` is its exit status, or minus the number of a
    signal.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return failure.message if failure is not None else f"it ended with status {code}"


def describe(
    run_directory: Path, rank: int, pid: int, code: int, failure: Failure | None, *, is_shown: bool
) -> str:
    """Which worker ended, why, after which step, and where to look.

    Args:
        run_directory: of the run.
        rank, pid: of the process that ended.
        code: its exit status, or minus the number of a signal.
        failure: what it reported before it ended, if anything.
        is_shown: whether it printed to where this process prints, and not to its log.
    """
    log = run_directory / "logs" / f"rank-{rank}.log"
    where = "what it printed above" if is_shown else str(log)
    see = f"see {where}" if is_shown or (log.exists() and log.stat().st_size) else ""
    who, step = f"worker {rank} (pid {pid})", last_step(run_directory, rank)
    when = f"after step {step}" if step else "before its first step"
    if code < 0:
        name = signal.Signals(-code).name
        advice = "did the machine run out of memory?" if name == "SIGKILL" else see
        return f"{who} was killed by {name} {when}" + (f"; {advice}" if advice else "")
    if failure is not None:
        details = f" ({see})" if failure.has_printed and see else ""
        return f"{who} failed {when}: {failure.message}{details}"
    return f"{who} ended with status {code} {when}" + (f"; {see}" if see else "")


def hint(run_directory: Path) -> str:
    """How to go on with a run that has ended before its time."""
    steps = sorted(entry.name for entry in (run_directory / "checkpoint").glob("step-*"))
    if not steps:
        return "; there is no checkpoint yet"
    return (
        f"; resume from step {int(steps[-1].removeprefix('step-'))} with: offbeat train --resume"
        f" {run_directory}"
    )
