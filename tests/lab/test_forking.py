"""Processes from a fork server are like those of fresh interpreters, and children of who asks for
them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lab_support import fork_server
from offbeat.run.config import ScriptCommand
from offbeat.run.local_worker import Placement, WorkerStart
from offbeat_lab.emulated_workers import first_imports
from offbeat_lab.forking import ForkedProcess, ForkServer, ForkServerError, WorkerForks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux"),
]

MODULE = "lab_support.fork_server"
DEADLINE_S = 60.0


def environment(**variables: str) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return os.environ | own | variables


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """One that was started in the background of a shell."""
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = ForkServer(MODULE, environment(OF_THE_SERVER="1"))
    finally:
        signal.signal(signal.SIGINT, heard)
    with closing(started) as server:
        yield server


class Forker:
    """A process, and the ends of its pipes."""

    def __init__(self, server: ForkServer, log: Path, *arguments: str, **options: Any) -> None:
        stdin, self.to_stdin = os.pipe()
        self.answers, answers = os.pipe()
        try:
            with log.open("ab") as output:
                self.process: ForkedProcess = server.fork(
                    arguments,
                    environment=options.pop("environment", environment()),
                    stdin=stdin,
                    output=output.fileno(),
                    descriptors=[answers],
                    **options,
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(stdin)
            os.close(answers)

    def close_stdin(self) -> None:
        os.close(self.to_stdin)
        self.to_stdin = -1

    def answer(self) -> str:
        return os.read(self.answers, 1 << 16).decode()

    def close(self) -> None:
        for descriptor in {self.to_stdin, self.answers} - {-1}:
            os.close(descriptor)


def ended(pid: int, within_s: float = DEADLINE_S) -> bool:
    """Wait for a process that need not be a child of this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_a_forked_process_is_what_a_fresh_one_would_be(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = environment(OF_THE_PROCESS="2")
    log = tmp_path / "log"
    with closing(Forker(server, log, "describe", environment=wanted)) as forked:
        assert forked.process.poll() is None
        os.write(forked.to_stdin, b"typed")
        forked.close_stdin()
        seen = json.loads(forked.answer())
        pid = forked.process.pid
        assert (seen["pid"], seen["parent"], seen["session"]) == (pid, os.getpid(), pid)
        assert seen["directory"] == seen["modules"] == str(tmp_path)
        assert seen["environment"] == wanted
        assert len(seen["descriptors"]) == 5  # its standard ones, the pipe, and that of the listing
        assert seen["inheritable"] == [False]
        assert seen["stdin"] == "typed"
        assert seen["hears_interrupts"]
        assert forked.process.wait() == forked.process.returncode == 5
    assert sorted(log.read_text().split()) == ["complained", "printed"]


def test_a_death_is_seen_and_the_server_goes_on(server: ForkServer, tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        with closing(Forker(server, tmp_path / "log", "wait")) as forked:
            forked.process.send_signal(number)
            assert forked.process.wait() == -number
            forked.process.send_signal(number)  # its number may be another's by now
            assert forked.process.poll() == -number


def test_processes_outlive_their_server(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(Forker(server, log, "wait")) as forked:
        server.close()
        assert forked.process.poll() is None
        with pytest.raises(ForkServerError, match="the fork server has failed"):
            Forker(server, log, "wait")
        forked.close_stdin()
        assert forked.process.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_forked_process_enters_a_network_namespace(server: ForkServer, tmp_path: Path) -> None:
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as elsewhere:
        assert elsewhere.stdout is not None
        elsewhere.stdout.readline()
        namespace = Path(f"/proc/{elsewhere.pid}/ns/net")
        with closing(Forker(server, tmp_path / "log", "describe", namespace=namespace)) as forked:
            forked.close_stdin()
            assert json.loads(forked.answer())["network"] == str(namespace.readlink())
            assert namespace.readlink() != Path("/proc/self/ns/net").readlink()
            assert forked.process.wait() == 5


def test_a_namespace_that_is_not_there_is_an_error(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(ForkServerError, match="FileNotFoundError.*no-such-namespace"):
        Forker(server, tmp_path / "log", "wait", namespace=tmp_path / "no-such-namespace")
    with closing(Forker(server, tmp_path / "log", "wait")) as forked:
        forked.close_stdin()
        assert forked.process.wait() == 0


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (fork_server.FAILS, "the fork server has ended: ImportError: no such thing"),
        (fork_server.HAS_A_THREAD, "not ready: it has 2 threads"),
    ],
)
def test_a_server_that_cannot_fork_says_why(tmp_path: Path, variable: str, message: str) -> None:
    with (
        closing(ForkServer(MODULE, environment(**{variable: str(tmp_path)}))) as server,
        pytest.raises(ForkServerError, match=message),
    ):
        Forker(server, tmp_path / "log", "wait")
    assert not server.has_forked


def test_what_the_server_printed_stands_in_the_log_of_each_process(tmp_path: Path) -> None:
    with closing(ForkServer(MODULE, environment(**{fork_server.PRINTS: "1"}))) as server:
        for name in ("one", "two"):
            with closing(Forker(server, tmp_path / name, "wait")) as forked:
                forked.close_stdin()
                forked.process.wait()
            assert (tmp_path / name).read_text() == "deprecated\n"


def test_the_server_imports_what_it_can_of_what_it_is_told(tmp_path: Path) -> None:
    names = ["no_such_module.thing", "colorsys.no_such_thing", "colorsys.rgb_to_hsv"]
    with (
        closing(ForkServer(MODULE, environment(), names)) as server,
        closing(Forker(server, tmp_path / "log", "describe")) as forked,
    ):
        forked.close_stdin()
        assert json.loads(forked.answer())["imported"] == ["colorsys"]
        forked.process.wait()


SUPERVISOR = """
import os, sys
from offbeat.run.local_worker import Placement, WorkerStart
from offbeat_lab.forking import WorkerForks

stdin, to_stdin = os.pipe()
wanted = WorkerStart(
    module="wait", arguments=[], placement=Placement(), environment=dict(os.environ),
    stdin=stdin, pipe=1, log=None,
)
WorkerForks("lab_support.fork_server").fork(wanted, output=2)
if os.fork() == 0:  # lives longer than this process, with a copy of each descriptor
    os.close(to_stdin)
    os.close(1)
sys.stdin.read()
"""


def test_nobody_is_left_when_the_supervisor_is_killed() -> None:
    """Neither the server, though a process that the supervisor forked by itself lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as supervisor:
        assert supervisor.stdout is not None
        server, worker = map(int, supervisor.stdout.readline().split())
        assert not ended(server, 0)
        supervisor.kill()
        assert ended(worker)
        assert ended(server)


@pytest.fixture
def forks() -> Iterator[WorkerForks]:
    with closing(WorkerForks(MODULE)) as forks:
        yield forks


def server_of(forks: WorkerForks, log: Path, imports: Sequence[str] = (), **variables: str) -> int:
    """The server that forks a worker with such an environment and imports."""
    reading, writing = os.pipe()
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing, open(reading) as answers:
        try:
            wanted = WorkerStart(
                module="wait",
                arguments=[],
                placement=Placement(),
                environment=environment(**variables),
                stdin=nothing.fileno(),
                pipe=writing,
                log=output,
            )
            process = forks.fork(wanted, output=output.fileno(), imports=imports)
        finally:
            os.close(writing)
        server, pid = map(int, answers.read().split())
        assert pid == process.pid
        assert process.wait() == 0
    return server


def test_one_server_forks_all_workers_of_the_same_circumstances(
    forks: WorkerForks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    server = server_of(forks, log)
    assert server_of(forks, log, RANK="1", MASTER_PORT="80", OFFBEAT_INTERFACE="lo") == server
    again = {"LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert server_of(forks, log, **again) == server
    monkeypatch.chdir(tmp_path)
    assert server_of(forks, log) == server
    assert server_of(forks, log, NUMBA_NUM_THREADS="2") != server
    assert ended(server)


def test_what_processes_inherit_is_of_the_circumstances(forks: WorkerForks, tmp_path: Path) -> None:
    server = server_of(forks, tmp_path / "log")
    before = os.umask(0o077)
    try:
        assert server_of(forks, tmp_path / "log") != server
    finally:
        os.umask(before)


def test_a_server_that_was_killed_is_replaced(forks: WorkerForks, tmp_path: Path) -> None:
    server = server_of(forks, tmp_path / "log")
    os.kill(server, signal.SIGKILL)
    assert ended(server)
    assert server_of(forks, tmp_path / "log") != server


def test_a_server_that_cannot_fork_is_started_once(forks: WorkerForks, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ForkServerError, match="no such thing"):
            server_of(forks, tmp_path / "log", **{fork_server.FAILS: str(tmp_path)})
    assert len(list(tmp_path.glob("started-*"))) == 1
    assert server_of(forks, tmp_path / "log") > 0


def test_a_server_that_cannot_fork_with_what_it_imports_does_without(
    forks: WorkerForks, tmp_path: Path
) -> None:
    threaded = ["lab_support.starts_a_thread"]
    server = server_of(forks, tmp_path / "log", threaded)
    assert server_of(forks, tmp_path / "log", threaded) == server
    assert server_of(forks, tmp_path / "log") == server
    assert server_of(forks, tmp_path / "log", ["colorsys"]) != server


def imports_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return first_imports(ScriptCommand(path=str(path), arguments=[]))


def test_they_end_where_the_script_does_something_else(tmp_path: Path) -> None:
    text = '''"""A script."""
from __future__ import annotations
import os, sklearn.datasets as data
from torch.utils import data as loaders
from math import *
from . import sibling
os.environ["SETTING"] = "1"
import transformers
'''
    assert imports_of(tmp_path / "train.py", text) == [
        "__future__.annotations",
        "os",
        "sklearn.datasets",
        "torch.utils.data",
        "math",
    ]


def test_the_scripts_own_modules_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").touch()
    text = "import model\nfrom layers.dense import Dense\nimport math\n"
    assert imports_of(tmp_path / "train.py", text) == ["math"]


def test_what_is_no_python_is_left_to_python(tmp_path: Path) -> None:
    assert imports_of(tmp_path / "train.py", "import math\nthis is no Python\n") == []
    module = ScriptCommand(path="package.train", arguments=[], as_module=True)
    assert first_imports(module) == []
