"""The fork server of this process's workers: started with the first worker, kept for later ones.

A forked worker has to be what a fresh interpreter would be. So a server forks only workers whose
circumstances are those that it was started in; for others a new one takes its place. What may
differ from worker to worker are the variables that are read after imports only. Where a server
cannot fork with what a program imports, as a module may start a thread, one without that takes its
place.
"""

from __future__ import annotations

import ast
import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final, TypeAlias

from offbeat.run.config import RunConfig, ScriptCommand
from offbeat.run.local_worker import WorkerProcess, WorkerProgram, WorkerStart, start_process
from offbeat.run.supervise import script_program
from offbeat_lab.forking import ForkedProcess, ForkServer, ForkServerError

WORKER: Final = "offbeat_lab.worker"
_SERVER: Final = "offbeat_lab.worker_server"

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

    def __init__(self, module: str = _SERVER) -> None:
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


def forking(imports: Sequence[str] = ()) -> Callable[[WorkerStart], WorkerProcess]:
    """Starts workers by forking, or as fresh interpreters where that cannot be done. Both behave
    alike, but what a forked worker sets before it imports torch it sets too late.

    Args:
        imports: what the process from which workers are forked imports for all of them.
    """

    def start(wanted: WorkerStart) -> WorkerProcess:
        output = sys.stdout.fileno() if wanted.log is None else wanted.log.fileno()
        try:
            return WORKER_FORKS.fork(
                [wanted.module, *wanted.arguments],
                environment=wanted.environment,
                stdin=wanted.stdin,
                output=output,
                pipe=wanted.pipe,
                namespace=wanted.placement.namespace,
                imports=imports,
            )
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
