"""The fork server of this process's workers: started with the first worker, kept for later ones.

A forked worker has to be what a fresh interpreter would be. So a server forks only workers whose
circumstances are those that it was started in; for others a new one takes its place. What may
differ from worker to worker are the variables that are read after imports only. Where a server
cannot fork with what a program imports, as a module may start a thread, one without that takes its
place.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from offbeat_lab.forking import ForkedProcess, ForkServer, ForkServerError

_MODULE = "offbeat_lab.worker_server"

_READ_LATE: Final = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "PYTEST_CURRENT_TEST",  # changes with each test, and nothing reads it
    }
)
"""Variables that nothing reads before a worker begins; so are those of offbeat itself."""

_OWN_PREFIX = "OFFBEAT_"

_INHERITED: Final = (
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigIgn",
    "CapEff",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)
"""Lines of /proc/PID/status with what a process inherits."""

_Circumstances: TypeAlias = tuple[tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]


class WorkerForks:
    """Forks workers, and keeps a server until this process ends. There is one, `WORKER_FORKS`.

    Args:
        module: of the server.
    """

    def __init__(self, module: str = _MODULE) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._circumstances: _Circumstances | None = None
        self._problems: dict[_Circumstances, str] = {}
        atexit.register(self.close)
        # A process that is forked from this one is not to keep the server alive, nor to use it.
        os.register_at_fork(after_in_child=self._forget)

    def fork(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int,
        output: int,
        pipe: int,
        namespace: Path | None,
        imports: Sequence[str] = (),
    ) -> ForkedProcess:
        """Fork a worker. Blocks until the server has been started, if need be.

        Args:
            arguments: of the worker's command.
            environment: all of it.
            stdin, output: descriptors of its standard input, and of its output and errors.
            pipe: descriptor to which it writes its reports.
            namespace: file of the network namespace that it is to be in; None for this process's.
            imports: names of what the server imports beforehand, where it can.

        Raises:
            ForkServerError: it cannot be forked, and has not begun. Start a fresh interpreter.
        """
        early = {name: text for name, text in environment.items() if not _is_read_late(name)}
        try:
            inherited = _inherited()
        except OSError as error:  # a system without /proc
            raise ForkServerError(str(error)) from error
        with self._lock:
            for wanted in dict.fromkeys([tuple(imports), ()]):
                circumstances = tuple(sorted(early.items())), inherited, wanted
                if circumstances in self._problems:
                    continue
                server = self._server_for(circumstances, early)
                try:
                    return server.fork(
                        arguments,
                        environment=environment,
                        stdin=stdin,
                        output=output,
                        descriptors=[pipe],
                        namespace=namespace,
                    )
                except ForkServerError as error:
                    if server.has_forked:
                        raise
                    self._problems[circumstances] = str(error)  # the next one would do no better
        raise ForkServerError(self._problems[circumstances])

    def close(self) -> None:
        """End the server, but none of the workers. The next worker would start another server."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _server_for(
        self, circumstances: _Circumstances, environment: Mapping[str, str]
    ) -> ForkServer:
        server = self._server
        if server is not None and self._circumstances == circumstances and server.alive:
            return server
        if server is not None:
            server.close()
        self._server = None
        self._server = ForkServer(self._module, environment, circumstances[-1])
        self._circumstances = circumstances
        return self._server

    def _forget(self) -> None:
        """Let go of the server, which belongs to the process that this one was forked from."""
        self._lock = threading.Lock()  # a thread that has it may not exist here
        if self._server is not None:
            self._server.forget()
            self._server = None


def _is_read_late(name: str) -> bool:
    return name in _READ_LATE or name.startswith(_OWN_PREFIX)


def _inherited() -> tuple[str, ...]:
    """What a child of this process inherits besides the environment."""
    own = Path("/proc/self")
    status = [
        line
        for line in (own / "status").read_text().splitlines()
        if line.partition(":")[0] in _INHERITED
    ]
    others = [(own / name).read_text() for name in ("limits", "cgroup")]
    return *others, *status


WORKER_FORKS: Final = WorkerForks()
"""Those of this process."""
