"""Measures between workers on this machine, over loopback: what offbeat itself costs, and nothing
about a network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from offbeat.errors import ConfigError, OffbeatError
from offbeat.run.coordination import LOOPBACK, serve_store
from offbeat_lab.doctor.measure import Measurement

MAX_WORKERS = 64
_TIMEOUT_S = 120.0


def measure_locally(workers: int) -> Measurement:
    """Start `workers` processes, let them measure, and end them.

    Raises:
        ConfigError: fewer than two workers, or more than 64.
        OffbeatError: one of them failed; the message is its last line.
    """
    if not 2 <= workers <= MAX_WORKERS:
        raise ConfigError(f"--workers is {workers}; a measurement takes 2 to {MAX_WORKERS}")
    with ExitStack() as stack:
        store = serve_store()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-doctor-")))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(workers):
            said = stack.enter_context((directory / f"said-{rank}").open("wb"))
            complained = stack.enter_context((directory / f"complained-{rank}").open("wb"))
            processes.append(
                start_measurement_worker(store.environment(rank, workers), said, complained)
            )
        failed = _wait(processes)
        if failed is not None:
            lines = (
                (directory / f"complained-{failed}")
                .read_text(errors="replace")
                .strip()
                .splitlines()
            )
            raise OffbeatError(
                f"worker {failed} of the measurement failed:"
                f" {lines[-1] if lines else 'it said nothing'}"
            )
        return TypeAdapter(Measurement).validate_json((directory / "said-0").read_bytes())


def start_measurement_worker(
    place: dict[str, str], said: IO[bytes], complained: IO[bytes]
) -> subprocess.Popen[bytes]:
    loopback = {
        "OFFBEAT_INTERFACE": LOOPBACK,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat_lab.doctor.worker"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | loopback | place,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=complained,
    )


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all, or for the first that fails; returns its rank."""
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = {pool.submit(_status, process): rank for rank, process in enumerate(processes)}
        wait(ends, return_when=FIRST_EXCEPTION)
        failed = [rank for end, rank in ends.items() if end.done() and end.exception() is not None]
        if failed:
            _end(processes)  # the pool waits for its threads, and those for the processes
    return failed[0] if failed else None


def _status(process: subprocess.Popen[bytes]) -> None:
    if process.wait(_TIMEOUT_S) != 0:
        raise OffbeatError(f"exit status {process.returncode}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
