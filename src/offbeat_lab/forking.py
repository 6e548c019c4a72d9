"""Processes that are forked from one which has imported what they need: the fork server.

Importing torch and offbeat takes seconds of processor time, and so does importing what the first
step of an optimizer needs. A fork server is a fresh interpreter that imports all of it once, has
one thread, and never touches CUDA. A process that it forks starts in about a hundredth of a second.

A process that is forked twice loses its parent when the one in between ends. The kernel then gives
it to the nearest ancestor that has declared itself a *child subreaper*, as the one that has asked
for it does meanwhile. So its exit status comes from the kernel, its number stays taken until
somebody has asked for the status, and the end of the server changes nothing for it.

The forkserver of `multiprocessing` with a preload was tried. Restarts and network namespaces would
allow it, as a child can enter its namespace by itself. These forbid it:

- Its processes are children of the server. When the server is killed, `exitcode` is 255 while the
  process lives, and the supervisor would record the death of a worker that trains on.
- The server has taken the exit status before anybody asks, so the number is free: `killpg` may hit
  another process group.
- A process begins in the server's session. Until it has called `setsid` itself, its group does not
  exist, and nobody can end what it has started.
- There is one server in a process. It keeps the environment, limits and preload that it was started
  with, and what starts another one is private.
- `current_process().name` is not "MainProcess" and `parent_process()` is not None, at which scripts
  look, and each process imports the main module of who asks for it once more.
- Arguments travel as pickle.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from offbeat.run.local_worker import WorkerStart
from offbeat_lab.network_namespace import enter

_PATIENCE_S = 120.0
"""How long a server may take to import what it has to, or to fork."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PR_GET_CHILD_SUBREAPER = 37

_READY = b"ready\n"
"""The first line that a server sends."""

_CHUNK_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16


class ForkServerError(Exception):
    """There is no fork server, or it has failed; the message says why."""


@dataclass(kw_only=True, eq=False)
class ForkedProcess:
    """A child of this process, with as much of `subprocess.Popen` as its users need.

    Attributes:
        pid: its number.
        returncode: its exit status, or minus the number of the signal that ended it. None until
            `poll` or `wait` has seen its end.
    """

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its return code; None while it runs."""
        self._reap(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end. Returns its return code."""
        self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> None:
        if self.returncode is not None:
            return
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # this process ignores SIGCHLD; `subprocess` says 0 as well
            self.returncode = 0
            return
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


class ForkServer:
    """A running fork server. Starting one returns at once; the first `fork` waits until it is
    ready.

    It ends when this process does, however that comes about: it reads the end of its socket.

    Args:
        module: what it runs, as `python -m`: imports what is needed, and calls `serve`.
        environment: of the server, and of each process unless `fork` says otherwise.
        imports: what else it is to import, from its second argument on.

    Attributes:
        has_forked: whether it has forked a process.

    Raises:
        ForkServerError: this system has no fork server.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], imports: Sequence[str] = ()
    ) -> None:
        if sys.platform != "linux":
            raise ForkServerError("fork servers need Linux")
        self.has_forked = False
        self._ready = False
        self._environment = dict(environment)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_PATIENCE_S)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server is
        with theirs:
            self._process = self.begin(
                module, theirs.fileno(), imports, self._environment, self._printed.fileno()
            )

    def begin(
        self,
        module: str,
        control: int,
        imports: Sequence[str],
        environment: Mapping[str, str],
        output: int,
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the server's process, which reads orders from `control` and prints to `output`."""
        return subprocess.Popen(
            [sys.executable, "-m", module, str(control), *imports],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control,),
            start_new_session=True,  # Ctrl-C is for this process
            env=environment,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int,
        output: int,
        descriptors: Sequence[int] = (),
        namespace: Path | None = None,
    ) -> ForkedProcess:
        """Start a process, in a session of its own and in the current directory of this process.

        Args:
            arguments: what it finds in its `Order`.
            environment: all of its environment.
            stdin: descriptor of its standard input.
            output: descriptor of its standard output and error. It begins with what the server
                printed while it imported.
            descriptors: further ones that it gets; their numbers there stand in its `Order`.
            namespace: file of the network namespace that it is to enter.

        Raises:
            ForkServerError: the server has ended, cannot fork, or what it forked could not become
                what was asked for. No process has begun.
        """
        changed: dict[str, str | None] = {
            name: value
            for name, value in environment.items()
            if self._environment.get(name) != value
        }
        removed = self._environment.keys() - environment.keys()
        message = {
            "arguments": list(arguments),
            "environment": changed | dict.fromkeys(sorted(removed)),
            "directory": os.getcwd(),  # noqa: PTH109 - a string is what is sent
            "namespace": None if namespace is None else str(namespace),
        }
        line = json.dumps(message).encode() + b"\n"
        try:
            if not self._ready:
                self._expect(_READY)
                self._ready = True
            with _child_subreaper():
                sent = socket.send_fds(self._socket, [line], [stdin, output, *descriptors])
                self._socket.sendall(line[sent:])
                outcome = json.loads(self._read_line())
                # Once the process in between has ended, its child is a child of this process.
                self._expect(b"\n")
            process = ForkedProcess(pid=outcome["pid"])
            if not _is_child(process.pid):
                raise ForkServerError("the kernel does not give forked processes to this one")
        except OSError as error:
            self.close()
            raise ForkServerError(f"the fork server has failed: {error}") from error
        except BaseException:
            self.close()  # what it says next would be taken for the answer to something else
            raise
        self.has_forked = True
        if outcome["problem"]:
            process.wait()
            raise ForkServerError(outcome["problem"])
        return process

    def close(self) -> None:
        """End the server, but no process that it has forked. Idempotent."""
        self._socket.close()
        self._printed.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Let go of the server, which belongs to the process that this one was forked from."""
        self._socket.close()
        self._printed.close()
        self._process.returncode = 0  # it is not a child of this process

    def _expect(self, wanted: bytes) -> None:
        line = self._read_line()
        if line != wanted:
            raise ForkServerError(f"the fork server is not ready: {line.decode().strip()}")

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            chunk = self._socket.recv(1)  # no byte of the next line
            if not chunk:
                raise ForkServerError(f"the fork server has ended: {self._last_words()}")
            line += chunk
        return line

    def _last_words(self) -> str:
        """The last line that the server has printed."""
        size = os.fstat(self._printed.fileno()).st_size
        # Not by seeking, since the server writes where this file's position is.
        lines = os.pread(self._printed.fileno(), size, 0).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextmanager
def _child_subreaper() -> Iterator[None]:
    """Descendants that lose their parent become children of this process meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ForkServerError("the kernel does not give forked processes to this one")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# In the server, and in what it forks


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a forked process is told.

    Attributes:
        arguments: as they were given to `ForkServer.fork`.
        descriptors: the further descriptors that it got, in the order given there. They are closed
            when the process executes another program.
    """

    arguments: list[str]
    descriptors: list[int]


def import_where_possible(names: Sequence[str]) -> None:
    """Import modules, or objects such as "sklearn.datasets.load_digits", that are installed. What
    cannot be imported fails again in whoever needs it.
    """
    # There `python -m` has put the current directory, which need not be the processes'.
    here = sys.path.pop(0)
    for name in names:
        with suppress(Exception, SystemExit):
            pkgutil.resolve_name(name)
    sys.path.insert(0, here)


def serve(control: socket.socket) -> Order | None:
    """Fork a process for each order that comes through `control`. Does not begin where this process
    cannot be forked, because it has a second thread.

    Returns:
        In each forked process its order; in the server None, when nobody is left who could send
        one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.pread(1, os.fstat(1).st_size, 0)  # a file, which `ForkServer` has given
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        control.sendall(b"it has %d threads, and only one would be forked\n" % num_threads)
        return None
    # Else the garbage collector of each process would write to all objects, and the kernel would
    # copy every page that the process shares with the server.
    gc.collect()
    gc.freeze()
    control.sendall(_READY)
    while True:
        line, descriptors = _receive(control)
        if not line:
            return None
        between = os.fork()
        if between == 0:
            message = json.loads(line)
            _fork_and_report(control, message, descriptors, printed)
            return Order(arguments=message["arguments"], descriptors=descriptors[2:])
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        control.sendall(b"\n")


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """A line and the descriptors that came with it; both are empty at the end."""
    line, descriptors, _, _ = socket.recv_fds(control, _CHUNK_BYTES, _MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    while line and not line.endswith(b"\n"):
        line += control.recv(_CHUNK_BYTES)
    return line, descriptors


def _fork_and_report(
    control: socket.socket, message: dict[str, Any], descriptors: Sequence[int], printed: bytes
) -> None:
    """Fork the process that `message` orders, and tell the client its number once it is ready.
    Returns in that process only.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        problem = os.read(reading, _CHUNK_BYTES)  # until the child has closed its end
        outcome = {"pid": pid, "problem": problem.decode(errors="replace")}
        control.sendall(json.dumps(outcome).encode() + b"\n")
        os._exit(0)
    try:
        control.close()
        os.close(reading)
        _become(message, descriptors, printed)
    except BaseException as error:  # noqa: BLE001 - the client is told of it
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(writing)


def _become(message: dict[str, Any], descriptors: Sequence[int], printed: bytes) -> None:
    """Make this process what `message` orders."""
    os.setsid()
    # The server ignores it where it was started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin, output = descriptors[:2]
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(stdin)
    os.close(output)
    with suppress(OSError):  # a full disk takes no log
        while printed:
            printed = printed[os.write(1, printed) :]
    if sys.path[0] == os.getcwd():  # noqa: PTH109 - `python -m` looks for modules there first
        sys.path[0] = message["directory"]
    os.chdir(message["directory"])
    for name, value in message["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if message["namespace"] is not None:
        enter(Path(message["namespace"]))


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

    A forked worker has to be what a fresh interpreter would be. So a server forks only workers
    whose circumstances are those that it was started in; for others a new one takes its place. What
    may differ from worker to worker are the variables that are read after imports only. Where a
    server cannot fork with what a program imports, as a module may start a thread, one without that
    takes its place.

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
        self, wanted: WorkerStart, *, output: int, imports: Sequence[str] = ()
    ) -> ForkedProcess:
        """Fork a worker. Blocks until the server has been started, if need be.

        Args:
            wanted: what it is to be; its module is the first of its arguments.
            output: descriptor of its output and errors.
            imports: names of what the server imports beforehand, where it can.

        Raises:
            ForkServerError: it cannot be forked, and has not begun. Start a fresh interpreter.
        """
        early = {name: text for name, text in wanted.environment.items() if not _is_read_late(name)}
        try:
            inherited = _inherited()
        except OSError as error:  # a system without /proc
            raise ForkServerError(str(error)) from error
        with self._lock:
            for imported in dict.fromkeys([tuple(imports), ()]):
                circumstances = tuple(sorted(early.items())), inherited, imported
                if circumstances in self._problems:
                    continue
                server = self._server_for(circumstances, early)
                try:
                    return server.fork(
                        [wanted.module, *wanted.arguments],
                        environment=wanted.environment,
                        stdin=wanted.stdin,
                        output=output,
                        descriptors=[wanted.pipe],
                        namespace=wanted.placement.namespace,
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
