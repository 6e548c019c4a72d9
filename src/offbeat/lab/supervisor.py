"""Local workers: started, watched and ended together.

Each worker is a process in a session of its own, so that Ctrl-C reaches only the supervisor, which decides. A worker learns of
the supervisor's end by its standard input closing. Where a strategy does not survive the death of a worker, one death
ends all, and the error names the worker that died first rather than those that noticed.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from offbeat.errors import PeerError
from offbeat.lab.progress import EXIT_STOPPED, PIPE_VARIABLE, Failure, Progress, decode
from offbeat.lab.records import last_step
from offbeat.lab.rendezvous import LOOPBACK, StoreServer
from offbeat.transport.connect import SECRET_VARIABLE

_POLL_S = 0.1
_SETTLE_S = 2.0  # after a death, how long the others may take to say what they saw
_STOP_S = 60.0  # after a request to stop, how long a step and a checkpoint may take


@dataclass(kw_only=True, slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    unread: bytes = b""
    failure: Failure | None = None


@dataclass(kw_only=True, slots=True)
class _Watch:
    """What the supervisor has seen and decided so far: `died` in order; deadlines on the monotonic clock."""

    num_interrupts: int = 0
    died: list[int] = field(default_factory=list)
    stop_deadline_s: float | None = None
    fail_deadline_s: float | None = None
    ended_by_us: set[int] = field(default_factory=set)


def supervise(run_directory: Path, num_workers: int, *, survives_death: bool, on_progress: Callable[[Progress], None]) -> bool:
    """Run the workers of `run_directory/config.json` to their end.

    Args:
        run_directory: a record with a config.json; workers write beside it.
        num_workers: how many to start.
        survives_death: whether the others go on when one dies.
        on_progress: called for each report of a worker.

    Returns:
        Whether they finished; False when they were interrupted and have written a checkpoint.

    Raises:
        PeerError: a worker died or failed, or was interrupted before it could write a checkpoint. No worker is left.
    """
    with ExitStack() as stack:
        store = StoreServer()
        stack.callback(store.close)
        workers: list[_Worker] = []
        stack.callback(_end_all, workers)
        watch = stack.enter_context(_interrupts())
        secret = secrets.token_hex(32)
        for rank in range(num_workers):
            environment = store.environment(rank, num_workers) | {SECRET_VARIABLE: secret}
            workers.append(_start(run_directory, rank, environment))
        _follow(workers, watch, survives_death=survives_death, on_progress=on_progress)
        return _verdict(run_directory, workers, watch, survives_death=survives_death)


def _start(run_directory: Path, rank: int, environment: Mapping[str, str]) -> _Worker:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    reading, writing = os.pipe()
    with (run_directory / "logs" / f"rank-{rank}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.lab.worker", str(run_directory / "config.json")],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": loopback,
                "OFFBEAT_INTERFACE": LOOPBACK,
                PIPE_VARIABLE: str(writing),
            }
            | dict(environment),
        )
    os.close(writing)
    return _Worker(rank=rank, process=process, pipe=reading)


def _follow(workers: list[_Worker], watch: _Watch, *, survives_death: bool, on_progress: Callable[[Progress], None]) -> None:
    """Pass reports on until every worker has ended, by itself or because it had to."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while any(worker.process.poll() is None for worker in workers) or selector.get_map():
            for key, _ in selector.select(_POLL_S):
                if not _read(key.data, on_progress):
                    selector.unregister(key.fileobj)
            _act(workers, watch, survives_death=survives_death)


def _read(worker: _Worker, on_progress: Callable[[Progress], None]) -> bool:
    """Take what `worker` has written; returns False at its end."""
    chunk = os.read(worker.pipe, 65_536)
    *lines, worker.unread = (worker.unread + chunk).split(b"\n")
    for line in lines:
        report = decode(line)
        if isinstance(report, Failure):
            worker.failure = report
        else:
            on_progress(report)
    return bool(chunk)


def _act(workers: list[_Worker], watch: _Watch, *, survives_death: bool) -> None:
    """Ask workers to stop after an interrupt; end them when one has died, or when stopping takes too long."""
    now_s = time.monotonic()
    alive = [worker for worker in workers if worker.process.poll() is None]
    if watch.num_interrupts and watch.stop_deadline_s is None:
        watch.stop_deadline_s = now_s + _STOP_S
        for worker in alive:
            worker.process.terminate()
    dead = [worker.rank for worker in workers if worker.process.returncode not in (None, 0, EXIT_STOPPED)]
    watch.died += [rank for rank in dead if rank not in watch.died]
    if watch.died and not survives_death and watch.fail_deadline_s is None:
        watch.fail_deadline_s = now_s + _SETTLE_S
    deadlines = [deadline for deadline in (watch.stop_deadline_s, watch.fail_deadline_s) if deadline is not None]
    if watch.num_interrupts > 1 or (deadlines and now_s > min(deadlines)):
        watch.ended_by_us |= {worker.rank for worker in alive}
        _kill(alive)


def _verdict(run_directory: Path, workers: list[_Worker], watch: _Watch, *, survives_death: bool) -> bool:
    """Whether the run finished, or the error that says who is to blame."""
    codes = {worker.rank: worker.process.returncode for worker in workers}
    if all(code == 0 for code in codes.values()):
        return True
    if all(code in (0, EXIT_STOPPED) for code in codes.values()):
        return False
    if survives_death and EXIT_STOPPED not in codes.values() and 0 in codes.values():
        return True
    if watch.num_interrupts and not any(worker.failure for worker in workers):
        raise PeerError(f"interrupted before the workers could write a checkpoint{_hint(run_directory)}")
    guilty = min(
        (worker for worker in workers if codes[worker.rank] not in (0, EXIT_STOPPED)),
        key=lambda worker: (worker.rank in watch.ended_by_us, _is_witness(worker), watch.died.index(worker.rank)),
    )
    raise PeerError(_describe(run_directory, guilty) + _hint(run_directory), rank=guilty.rank)


def _is_witness(worker: _Worker) -> bool:
    """Whether the worker failed only because it noticed another's end."""
    return worker.failure is not None and worker.failure.kind.startswith("Peer")


def _describe(run_directory: Path, worker: _Worker) -> str:
    log = run_directory / "logs" / f"rank-{worker.rank}.log"
    who, code = f"worker {worker.rank} (pid {worker.process.pid})", worker.process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        cause = "; did the machine run out of memory?" if name == "SIGKILL" else f"; see {log}"
        return f"{who} was killed by {name} after step {last_step(run_directory, worker.rank)}{cause}"
    if worker.failure is not None:
        message = worker.failure.message
        return f"{who} failed after step {last_step(run_directory, worker.rank)}: {message} (details in {log})"
    return f"{who} ended with status {code} after step {last_step(run_directory, worker.rank)}; see {log}"


def _hint(run_directory: Path) -> str:
    steps = sorted(entry.name for entry in (run_directory / "checkpoint").glob("step-*"))
    if not steps:
        return "; there is no checkpoint yet"
    return f"; resume from step {int(steps[-1].removeprefix('step-'))} with: offbeat train --resume {run_directory}"


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)  # its own session: whatever it started goes with it


def _end_all(workers: list[_Worker]) -> None:
    _kill(workers)
    for worker in workers:
        worker.process.wait()
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        os.close(worker.pipe)


@contextmanager
def _interrupts() -> Iterator[_Watch]:
    """Count SIGINT and SIGTERM in place of being ended by them. Elsewhere than in the main thread, only watch workers."""
    watch = _Watch()

    def count(number: int, frame: FrameType | None) -> None:
        watch.num_interrupts += 1

    if threading.current_thread() is not threading.main_thread():
        yield watch
        return
    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
