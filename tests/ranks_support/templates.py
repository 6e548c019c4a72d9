"""The test's side of `ranks_support.template`: starts templates when they are first needed, and has
ranks forked.
"""

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
"""Each has a seed of its own for the hashes of strings, so that ranks do not go through a set in
the same order by chance.
"""


class Forked:
    """A rank's process, with as much of `subprocess.Popen` as a test needs. It is not this
    process's child.
    """

    def __init__(self, status: IO[str]) -> None:
        self._status = status
        self._returncode: int | None = None
        pid = status.readline()
        assert pid, "the template has ended; what it printed says why"
        self.pid = int(pid)

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


class Template:
    """A running one."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": str(int.from_bytes(os.urandom(2))),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-m", "ranks_support.template", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def fork(self, orders: Orders, environment: Mapping[str, str], log: Path) -> Forked:
        """Start a rank; it has `orders.result_fd` too from then on."""
        message = asdict(orders) | {"environment": dict(environment), "directory": str(Path.cwd())}
        line = json.dumps(message).encode() + b"\n"
        reading, writing = os.pipe()
        status = os.fdopen(reading)
        try:
            with log.open("wb") as output:
                sent = socket.send_fds(
                    self._orders, [line], [orders.result_fd, output.fileno(), writing]
                )
            self._orders.sendall(line[sent:])
        except BaseException:
            status.close()
            raise
        finally:
            os.close(writing)
        return Forked(status)

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


class Templates:
    """The templates of a test session, started when the first rank is."""

    def __init__(self) -> None:
        self._templates: list[Template] = []

    def fork(self, orders: Orders, environment: Mapping[str, str], log: Path) -> Forked:
        """Start a rank; it has `orders.result_fd` too from then on."""
        if not self._templates:
            self._templates = [Template() for _ in range(NUM_TEMPLATES)]
        return self._templates[orders.rank % NUM_TEMPLATES].fork(orders, environment, log)

    def close(self) -> None:
        for template in self._templates:
            template.close()
