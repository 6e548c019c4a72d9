"""One local worker: its process, the pipe that it reports through, and what it has reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from offbeat.errors import WireError
from offbeat.run.progress import (
    EXIT_STOPPED,
    MAX_REPORT_BYTES,
    PIPE_VARIABLE,
    Failure,
    Report,
    decode,
)
from offbeat.run.records import last_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a worker is to run.

    Attributes:
        prefix: words to put before its command; what they name turns into the worker, so that its
            pid stays the same.
        namespace: file of the network namespace that `prefix` enters; None where it enters none.
        environment: variables to add to its own.
    """

    prefix: tuple[str, ...] = ()
    namespace: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class WorkerProcess(Protocol):
    """A process, as `subprocess.Popen` has it."""

    returncode: int | None

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """How one worker's process is to be started.

    Attributes:
        module, arguments: it runs as by `python -m`.
        placement: where it runs.
        environment: all of its variables.
        stdin, pipe: descriptors of its standard input, and of the pipe that it reports through.
        log: takes what it prints; None: that goes to where this process prints.
    """

    module: str
    arguments: Sequence[str]
    placement: Placement
    environment: Mapping[str, str]
    stdin: int
    pipe: int
    log: IO[bytes] | None


def start_process(start: WorkerStart) -> WorkerProcess:
    """Start a fresh interpreter."""
    return subprocess.Popen(
        [*start.placement.prefix, sys.executable, "-m", start.module, *start.arguments],
        stdin=start.stdin,
        stdout=start.log,
        stderr=start.log,
        pass_fds=(start.pipe,),
        start_new_session=True,
        env={**start.environment, PIPE_VARIABLE: str(start.pipe)},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgram:
    """What a worker's process runs.

    Attributes:
        module: it runs as by `python -m`, with the path of a config.json.
        start: makes the process.
        shown: ranks that print to where this process prints; the others print to logs.
        environment: variables that it is told in the place of the usual ones.
        ends_alone: whether one that has ended well does not mean that the others are about to.
    """

    module: str
    start: Callable[[WorkerStart], WorkerProcess] = start_process
    shown: Collection[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_alone: bool = False


@dataclass(kw_only=True, slots=True)
class LocalWorker:
    """A process that has a rank, in a session of its own.

    Attributes:
        rank: which one.
        process: of it.
        stdin: its standard input, whose end ends the worker.
        pipe: the descriptor from which its reports are read.
        restart: how many processes have had this rank before and died.
        survives_death: whether the others go on if one dies, as it reported last; before the first
            report they need all workers, to find each other.
        joined: whether it is one of the members; one that comes back has to become one.
        failure: why it gave up, if it reported so.
        seconds: its training time.
        paused_at: the step at which it waits until it may train on.
        met_s: for how long it has waited for the others before clocks stop.
        death_recorded: whether the supervisor has recorded its death.
    """

    rank: int
    process: WorkerProcess
    stdin: IO[bytes]
    pipe: int
    restart: int = 0
    survives_death: bool = False
    joined: bool = True
    failure: Failure | None = None
    seconds: float = 0.0
    paused_at: int | None = None
    met_s: float = 0.0
    death_recorded: bool = False
    _unread: bytes = b""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ended_well(self) -> bool:
        return self.process.poll() in (0, EXIT_STOPPED) and self.failure is None

    @property
    def is_secondary_failure(self) -> bool:
        """Whether it failed only because it noticed that a peer had failed."""
        return self.failure is not None and self.failure.kind.startswith("Peer")

    def read(self) -> tuple[list[Report], bool]:
        """What it has reported since, and whether more may come. Waits where there is
        nothing yet.
        """
        chunk = os.read(self.pipe, 65_536)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if len(self._unread) > MAX_REPORT_BYTES:
            raise WireError(
                f"worker {self.rank} reported a line of more than {MAX_REPORT_BYTES} bytes to its"
                " supervisor; does something else in it write to the same descriptor?"
            )
        return [decode(line) for line in lines], bool(chunk)

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Send it the signal `number`. Ctrl-C is for what it has started, too, as from a terminal:
        those may be the ranks.
        """
        if number == signal.SIGINT and self.alive:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.alive:
            # Its own session: whatever it started goes with it.
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end, and give back what belonged to it."""
        self.process.wait()
        with suppress(OSError):
            self.stdin.close()
        os.close(self.pipe)


def start_worker(
    rank: int,
    run_directory: Path,
    placement: Placement,
    environment: Mapping[str, str],
    *,
    program: WorkerProgram,
    restart: int,
    seconds: float,
) -> LocalWorker:
    """Start the process of `rank` of the run in `run_directory`.

    Args:
        rank: which one.
        run_directory: a record with a config.json; what the process prints goes to its logs.
        program: what it runs.
        placement: where it runs.
        environment: what it is told besides what this process was told.
        restart: how many processes have had this rank before and died.
        seconds: training time so far.
    """
    stdin, to_stdin = os.pipe()
    reading, writing = os.pipe()
    try:
        with (run_directory / "logs" / f"rank-{rank}.log").open("ab") as log:
            process = program.start(
                WorkerStart(
                    module=program.module,
                    arguments=[str(run_directory / "config.json")],
                    placement=placement,
                    environment={**os.environ, **environment, **placement.environment},
                    stdin=stdin,
                    pipe=writing,
                    log=None if rank in program.shown else log,
                )
            )
    except BaseException:
        os.close(to_stdin)
        os.close(reading)
        raise
    finally:
        os.close(stdin)
        os.close(writing)
    return LocalWorker(
        rank=rank,
        process=process,
        stdin=os.fdopen(to_stdin, "wb"),
        pipe=reading,
        restart=restart,
        joined=not restart,
        seconds=seconds,
    )


def cause_of_end(code: int, failure: Failure | None) -> str:
    """Why a process ended, in a few words: `code` is its exit status, or minus the number of a
    signal.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return failure.message if failure is not None else f"it ended with status {code}"


def description_of_end(
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
    # It may have done another step or two, which it had not written down yet.
    when = f"after step {step} was recorded" if step else "before its first step was recorded"
    if code < 0:
        name = signal.Signals(-code).name
        advice = "did the machine run out of memory?" if name == "SIGKILL" else see
        return f"{who} was killed by {name} {when}" + (f"; {advice}" if advice else "")
    if failure is not None:
        details = f" ({see})" if failure.has_printed and see else ""
        return f"{who} failed {when}: {failure.message}{details}"
    return f"{who} ended with status {code} {when}" + (f"; {see}" if see else "")
