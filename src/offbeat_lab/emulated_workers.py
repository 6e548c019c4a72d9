"""Workers on an emulated cluster: placed and slowed as its description says, and struck by its
faults.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from shlex import quote
from typing import Any, Final

from typing_extensions import override

from offbeat.errors import PeerError
from offbeat.run.config import RunConfig, ScriptCommand
from offbeat.run.coordination import RunStore, serve_store
from offbeat.run.local_worker import (
    LocalWorker,
    Placement,
    WorkerProcess,
    WorkerProgram,
    WorkerStart,
    start_process,
)
from offbeat.run.progress import EXIT_STOPPED
from offbeat.run.supervise import script_program
from offbeat.run.supervisor import WorkerGroup
from offbeat_lab.cluster import Cluster, ClusterFault, SpeedChange
from offbeat_lab.config import cluster_of
from offbeat_lab.emulation import Emulation
from offbeat_lab.forking import WORKER_FORKS, ForkServerError
from offbeat_lab.pauses import TURNS_VARIABLE

WORKER: Final = "offbeat_lab.worker"

SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}
"""Faults that are a signal to the worker."""

UNDONE_BY: Final[Mapping[str, str]] = {"stop": "continue", "cut": "mend"}
"""Faults that may hold all workers up until the fault that undoes them."""


class EmulatedGroup(WorkerGroup):
    """The workers of one run on an emulated cluster.

    Args:
        run_directory: a record with a config.json; workers write beside it.
        config: what it says.
        emulation: of the run's cluster, or of this machine as it is.
        turns: whether workers train only up to the step that `run_until` names.
        options: further ones of `WorkerGroup`.

    Attributes:
        remarks: also what of the cluster's script could not be carried out.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        emulation: Emulation,
        *,
        turns: bool = False,
        **options: Any,
    ) -> None:
        program = worker_program(config)
        if turns:
            program = replace(program, environment={**program.environment, TURNS_VARIABLE: "1"})
        super().__init__(run_directory, config, program=program, **options)
        self._emulation = emulation
        self._cluster = cluster_of(config)
        cluster = self._cluster or Cluster()
        self._events: list[ClusterFault | SpeedChange] = sorted(
            [*cluster.faults, *cluster.changes], key=lambda action: action.at_s
        )
        """Those that are to come, in order of time."""
        self._killed: dict[int, float] = {}
        """Workers that the cluster's script has killed, and when."""
        self._held_up: set[tuple[str, int]] = set()
        self._heard_s = 0.0
        self._until_step: int | None = None

    @property
    def paused_at(self) -> int | None:
        """The step at which all living workers wait for the next turn; None while one of them still
        trains.
        """
        living = [worker for worker in self._workers if worker.alive]
        steps = [worker.paused_at for worker in living if worker.paused_at is not None]
        return min(steps) if living and len(steps) == len(living) else None

    @property
    def met_s(self) -> float:
        """For how long the first worker that came to the end of the last turn waited there."""
        return max((worker.met_s for worker in self._workers if worker.alive), default=0.0)

    def run_until(self, until_step: int) -> None:
        """Let the workers train up to `until_step`."""
        self._until_step = until_step
        for worker in self._workers:
            self._run_until(worker, until_step)

    def has_finished(self) -> bool:
        """Whether the run finished; False when it was interrupted and has written a checkpoint.

        Raises:
            PeerError: a worker died or failed; the message names it and says how to go on.
        """
        root_cause = self.root_cause()
        if root_cause is None:
            return all(w.process.returncode != EXIT_STOPPED for w in self._workers)
        how_to_go_on = hint(self.run_directory) if self._config.script is None else ""
        if self._num_interrupts and not any(worker.failure for worker in self._workers):
            raise PeerError(
                f"interrupted before the workers could write a checkpoint{how_to_go_on}"
            )
        raise PeerError(self.describe(root_cause) + how_to_go_on, rank=root_cause.rank)

    @override
    def poll(self, timeout_s: float) -> None:
        """Also carries out the cluster's events that are due."""
        super().poll(timeout_s)
        event_time_s = self._event_time_s()
        while self._events and self._events[0].at_s <= event_time_s:
            self._carry_out(self._events.pop(0))

    @override
    def interrupt(self, number: int = signal.SIGTERM) -> None:
        super().interrupt()  # a worker that has just begun ends by this signal without a traceback

    @override
    def root_cause(self) -> LocalWorker | None:
        worker = super().root_cause()
        for action in self._events if worker is None else ():
            if isinstance(action, ClusterFault) and action.action == "return":
                self._remark_not_carried_out(action, "the run was over before")
        return worker

    @override
    def describe(self, worker: LocalWorker) -> str:
        if worker.rank in self._killed:
            return (
                f"worker {worker.rank} was killed, as the cluster description says, and"
                f" {self._config.strategy} cannot go on without it"
            )
        return super().describe(worker)

    @override
    def _serve_store(self) -> RunStore:
        return self._emulation.call_inside(lambda: serve_store(self._emulation.store_address))

    @override
    def _placement(self, local_rank: int) -> Placement:
        return self._emulation.placement(local_rank)

    @override
    def _watch(self, worker: LocalWorker) -> None:
        super()._watch(worker)
        self._emulation.admit(worker.rank, worker.process.pid)

    def _run_until(self, worker: LocalWorker, until_step: int) -> None:
        self._apply_speed(worker.rank)
        worker.paused_at = None
        with suppress(OSError):  # a dead worker is noticed elsewhere
            worker.stdin.write(f"{until_step}\n".encode())
            worker.stdin.flush()

    @override
    def _read(self, worker: LocalWorker) -> bool:
        before_s = worker.seconds
        more = super()._read(worker)
        if worker.seconds != before_s:
            self._heard_s = time.monotonic()
        return more

    @override
    def _cause(self, worker: LocalWorker) -> str:
        if worker.rank in self._killed and worker.rank not in self._ended_by_us:
            return f"killed by the script at {self._killed[worker.rank]:g} s"
        return super()._cause(worker)

    @override
    def _may_return(self, worker: LocalWorker) -> bool:
        return worker.rank not in self._killed and super()._may_return(worker)

    @override
    def _start_again(self, old: LocalWorker) -> None:
        self._killed.pop(old.rank, None)
        super()._start_again(old)
        if self._until_step is not None:
            self._run_until(self._workers[old.rank], self._until_step)

    @override
    def _close(self) -> None:
        super()._close()
        for undoing, rank in self._held_up:
            if undoing == "mend":  # the link is not this run's alone
                self._emulation.set_link(rank, up=True)

    def _remark_not_carried_out(self, fault: ClusterFault, why: str) -> None:
        self.remarks.append(
            f"not carried out: {fault.action} worker {fault.worker} at {fault.at_s:g} s; {why}"
        )

    def _event_time_s(self) -> float:
        """The time that events are due by: training time, but the clock's while a fault may hold
        all workers up, since no training would bring about the fault's end.
        """
        return self.seconds + (time.monotonic() - self._heard_s if self._held_up else 0.0)

    def _carry_out(self, action: ClusterFault | SpeedChange) -> None:
        worker = self._workers[action.worker]
        if isinstance(action, SpeedChange):
            # Where a fault holds all up, training time may not have come so far.
            self._apply_speed(action.worker, least_s=action.at_s)
        elif action.action == "return":
            self._restart(action)
        elif action.action in SIGNALS:
            if worker.alive:
                if action.action == "kill":
                    self._killed[worker.rank] = action.at_s
                os.killpg(worker.process.pid, SIGNALS[action.action])
                self._record_hold_up(action)
        elif self._emulation.set_link(action.worker, up=action.action == "mend"):
            self._record_hold_up(action)
        else:
            self._remark_not_carried_out(action, "it needs network namespaces")

    def _restart(self, action: ClusterFault) -> None:
        """Start the process of a worker anew, unless it never died, or no peer is left for it to
        join.
        """
        old = self._workers[action.worker]
        if old.rank in self._killed:
            old.process.wait()  # the same moment may have killed it
        self._find_deaths()
        if not old.death_recorded or not self.peers_go_on:
            return
        if self._num_interrupts or not any(worker.alive for worker in self._workers):
            self._remark_not_carried_out(action, "the run was over before")
            return
        self._start_again(old)

    def _record_hold_up(self, fault: ClusterFault) -> None:
        if fault.action in UNDONE_BY:
            self._held_up.add((UNDONE_BY[fault.action], fault.worker))
            self._heard_s = time.monotonic()
        self._held_up.discard((fault.action, fault.worker))

    def _apply_speed(self, rank: int, *, least_s: float = 0.0) -> None:
        if self._cluster is not None:
            elapsed_s = max(least_s, self.seconds)
            self._emulation.set_speed(rank, self._cluster.speed_at(rank, elapsed_s))


def hint(run_directory: Path) -> str:
    """How to go on with a run that has ended before its time."""
    steps = sorted(entry.name for entry in (run_directory / "checkpoint").glob("step-*"))
    if not steps:
        return "; there is no checkpoint yet"
    return (
        f"; resume from step {int(steps[-1].removeprefix('step-'))} with: offbeat train --resume"
        f" {quote(str(run_directory))}"
    )


def forking(imports: Sequence[str] = ()) -> Callable[[WorkerStart], WorkerProcess]:
    """Starts workers by forking, or as fresh interpreters where that cannot be done. Both behave
    alike, but what a forked worker sets before it imports torch it sets too late.

    Args:
        imports: what the process from which workers are forked imports for all of them.
    """

    def start(wanted: WorkerStart) -> WorkerProcess:
        output = sys.stdout.fileno() if wanted.log is None else wanted.log.fileno()
        try:
            return WORKER_FORKS.fork(wanted, output=output, imports=imports)
        except ForkServerError as error:
            with suppress(OSError):  # a full disk takes no log
                os.write(output, f"not forked: {error}\n".encode())
        return start_process(wanted)

    return start


def worker_program(config: RunConfig) -> WorkerProgram:
    """What the workers of a run are: each trains a task, or runs a user's script."""
    if config.script is None:
        return WorkerProgram(module=WORKER, start=forking())
    start = forking(first_imports(config.script))
    return script_program(config.workers, module=WORKER, start=start)


def first_imports(script: ScriptCommand) -> list[str]:
    """What `script` begins by importing, up to its first statement that is no import: names such
    as "sklearn.datasets.load_digits". Modules in the script's own directory are left out, as they
    may be anything; of what runs as a module, or is no Python, there is nothing.
    """
    path = Path(script.path)
    try:
        statements = [] if script.as_module else ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    if statements and isinstance(statements[0], ast.Expr):  # its docstring
        del statements[0]
    names: list[str] = []
    for statement in statements:
        match statement:
            case ast.Import(names=imported):
                names += [each.name for each in imported]
            case ast.ImportFrom(module=str(module), names=imported, level=0):
                names += [f"{module}.{each.name}".removesuffix(".*") for each in imported]
            case _:
                break
    beside = [str(path.resolve().parent)]
    return [name for name in names if PathFinder.find_spec(name.partition(".")[0], beside) is None]
