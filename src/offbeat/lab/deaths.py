"""What is said of a worker's process that has ended before its time."""

from __future__ import annotations

import signal
from pathlib import Path

from offbeat.lab.progress import Failure
from offbeat.lab.records import last_step


def cause(code: int, failure: Failure | None) -> str:
    """Why a process ended, in a few words: `code` is its exit status, or minus the number of a
    signal.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return failure.message if failure is not None else f"it ended with status {code}"


def describe(run_directory: Path, rank: int, pid: int, code: int, failure: Failure | None) -> str:
    """Which worker ended, why, after which step, and where to look.

    Args:
        run_directory: of the run.
        rank, pid: of the process that ended.
        code: its exit status, or minus the number of a signal.
        failure: what it reported before it ended, if anything.
    """
    log = run_directory / "logs" / f"rank-{rank}.log"
    who, step = f"worker {rank} (pid {pid})", last_step(run_directory, rank)
    if code < 0:
        name = signal.Signals(-code).name
        advice = "; did the machine run out of memory?" if name == "SIGKILL" else f"; see {log}"
        return f"{who} was killed by {name} after step {step}{advice}"
    if failure is not None:
        return f"{who} failed after step {step}: {failure.message} (details in {log})"
    return f"{who} ended with status {code} after step {step}; see {log}"


def hint(run_directory: Path) -> str:
    """How to go on with a run that has ended before its time."""
    steps = sorted(entry.name for entry in (run_directory / "checkpoint").glob("step-*"))
    if not steps:
        return "; there is no checkpoint yet"
    return (
        f"; resume from step {int(steps[-1].removeprefix('step-'))} with: offbeat train --resume"
        f" {run_directory}"
    )
