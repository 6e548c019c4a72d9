"""The test's side of `ranks_support.template`: starts templates when they are first needed, and has ranks forked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from ranks_support.rank import Orders

NUM_TEMPLATES = 2
"""Each has a seed of its own for the hashes of strings, so that ranks do not go through a set in the same order by chance."""


class Forked:
    """A rank's process, with as much of `subprocess.Popen` as a test needs. It is not this process's child."""

    def __init__(self, status: IO[str]) -> None:
        self._status = status
        self._returncode: int | None = None
        self.pid = int(status.readline())

    @property
    def returncode(self) -> int:
        assert self._returncode is not None, "wait comes first"
        return self._returncode

    def wait(self) -> None:
        if self._returncode is None:
            self._returncode = int(self._status.readline())
            self._status.close()

    def send_signal(self, number: signal.Signals) -> None:
        if self._returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Templates:
    """The templates of a test session."""

    def __init__(self) -> None:
        self._templates: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def fork(self, orders: Orders, environment: Mapping[str, str], log: Path) -> Forked:
        """Start a rank, which takes over `orders.result_fd`."""
        message = asdict(orders) | {"environment": dict(environment), "directory": str(Path.cwd())}
        reading, writing = os.pipe()
        try:
            with log.open("wb") as output:
                _, theirs = self._template(orders.rank % NUM_TEMPLATES)
                socket.send_fds(theirs, [json.dumps(message).encode()], [orders.result_fd, output.fileno(), writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return Forked(os.fdopen(reading))

    def close(self) -> None:
        for process, theirs in self._templates.values():
            theirs.close()
            process.wait()

    def _template(self, place: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if place not in self._templates:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": str(int.from_bytes(os.urandom(2))),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            command = [sys.executable, "-m", "ranks_support.template", str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            self._templates[place] = process, ours
        return self._templates[place]
