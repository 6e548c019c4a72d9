"""Starts real ranks, waits for all of them, and says which one failed and how."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch.distributed as dist

from offbeat_lab.forking import ForkedProcess
from ranks_support import references
from ranks_support.rank import LOOPBACK, STORE_PORT_VARIABLE, Orders
from ranks_support.templates import Templates, from_template

START_S = 60.0
"""How long the processes may take to begin: several import torch at once, perhaps beside other
tests.
"""

END_S = 30.0
"""How long a process may take to end once its function has returned."""

GRACE_S = 5.0
"""Once a rank has failed, how long the others may take to say what they think of it before they are
ended.
"""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RanksError(Exception):
    """Some ranks did not return. The message has one paragraph for each, in the order in which they
    ended.
    """


class RunRanks(Protocol):
    """The fixture `run_ranks`."""

    def __call__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *,
        timeout_s: float = 60.0,
        may_die: Collection[int] = (),
        **arguments: Any,
    ) -> list[Any]: ...


@dataclass(kw_only=True, eq=False)
class Process:
    """One rank, as the test sees it."""

    rank: int
    process: ForkedProcess
    log: Path
    timeout_s: float
    received: bytearray = field(default_factory=bytearray)
    overdue: str = "did not start"
    deadline_s: float = field(default_factory=lambda: time.monotonic() + START_S)
    was_told_to_end: bool = False

    def hear(self, chunk: bytes) -> None:
        """The first byte says that the rank has joined the group; a line after it is
        the outcome.
        """
        self.received += chunk
        if self.outcome:
            self.overdue, self.deadline_s = "returned but did not end", time.monotonic() + END_S
        elif self.overdue == "did not start":
            self.overdue, self.deadline_s = "hung", time.monotonic() + self.timeout_s

    def hurry(self) -> None:
        """Another rank has failed: this one may take only a moment more."""
        if (
            not self.was_told_to_end
            and not self.outcome
            and time.monotonic() + GRACE_S < self.deadline_s
        ):
            self.overdue, self.deadline_s = (
                "was ended because another one had failed",
                time.monotonic() + GRACE_S,
            )

    def end(self) -> None:
        """End the process by a signal at which it prints its stacks; if it was told so before, by
        one it cannot ignore.
        """
        self.process.send_signal(signal.SIGKILL if self.was_told_to_end else signal.SIGABRT)
        self.process.send_signal(signal.SIGCONT)
        self.was_told_to_end, self.deadline_s = True, time.monotonic() + GRACE_S

    @property
    def outcome(self) -> dict[str, Any]:
        """What the rank wrote before it ended: its value, or what it raised; empty when it did not
        get that far.
        """
        return dict(json.loads(self.received)) if self.received.endswith(b"}\n") else {}

    def failure(self) -> str | None:
        """A paragraph that says how the rank failed; None when it returned."""
        printed = self.log.read_text(errors="replace").strip()
        if raised := self.outcome.get("raised"):
            return f"rank {self.rank} raised {raised}\n{self.outcome['traceback']}{printed}"
        if self.was_told_to_end:
            return f"rank {self.rank} {self.overdue}, stack:\n{printed}"
        status = self.process.wait()
        if status < 0:
            return f"rank {self.rank} killed by {signal.Signals(-status).name}\n{printed}"
        if status > 0 or not self.outcome:
            return f"rank {self.rank} ended with status {status}\n{printed}"
        return None


def launch(
    function: Callable[..., Any],
    world_size: int,
    *,
    templates: Templates,
    directory: Path,
    timeout_s: float,
    may_die: Collection[int],
    arguments: dict[str, Any],
) -> list[Any]:
    """See the fixture `run_ranks`; `directory` takes what the ranks print."""
    __tracebackhide__ = True
    with ExitStack() as stack:
        # Given only an address, the store would listen on every interface.
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        values = launch_in_places(
            function,
            [Place()] * world_size,
            templates=templates,
            directory=directory,
            timeout_s=timeout_s,
            store_port=port,
            may_die=may_die,
            arguments=arguments,
        )
        del store
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank runs: variables that it has besides the usual ones, and the file of its network
    namespace.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    namespace: Path | None = None


def launch_in_places(
    function: Callable[..., Any],
    places: Sequence[Place],
    *,
    templates: Templates,
    directory: Path,
    timeout_s: float = START_S,
    store_port: int = 0,
    may_die: Collection[int] = (),
    arguments: Mapping[str, Any],
) -> list[Any]:
    """Run a function in a process for each of `places`, and return what each of them returned.
    Without a store they are in no group, unless the function joins one.
    """
    __tracebackhide__ = True
    job = references.dumps({"function": function, "arguments": dict(arguments)})
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        processes = []
        for rank, place in enumerate(places):
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            orders = Orders(
                rank=rank,
                world_size=len(places),
                store_port=store_port,
                result_fd=writing,
                limit_s=START_S + timeout_s + END_S + 2 * GRACE_S,
                job=job,
            )
            process = stack.enter_context(
                started(templates, orders, directory / f"rank-{rank}.log", timeout_s, place)
            )
            processes.append(process)
            selector.register(reading, selectors.EVENT_READ, process)
        ended = watch(selector, processes, may_die)
    failures = [failure for p in ended if p.rank not in may_die and (failure := p.failure())]
    if failures:
        raise RanksError("\n\n".join(failures))
    return [process.outcome.get("value") for process in processes]


@contextmanager
def started(
    templates: Templates, orders: Orders, log: Path, timeout_s: float, place: Place
) -> Iterator[Process]:
    """A rank; it has ended when the block is left, whatever happened inside."""
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    } | {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OFFBEAT_INTERFACE": LOOPBACK,
        "OMP_NUM_THREADS": "1",
        STORE_PORT_VARIABLE: str(orders.store_port),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # for what it starts itself
        **place.environment,
    }
    try:
        process = templates.fork(orders, environment, log, namespace=place.namespace)
    finally:
        os.close(orders.result_fd)
    try:
        watched = Process(rank=orders.rank, process=process, log=log, timeout_s=timeout_s)
        if not orders.store_port:  # it will not say that it has joined a group
            watched.overdue, watched.deadline_s = "hung", watched.deadline_s + timeout_s
        yield watched
    finally:
        process.kill()
        process.wait()


def watch(
    selector: selectors.BaseSelector, processes: list[Process], may_die: Collection[int]
) -> list[Process]:
    """Read the pipes until every rank has ended, or been ended. Returns the ranks in the order in
    which they ended.
    """
    ended: list[Process] = []
    while going := [process for process in processes if process not in ended]:
        events = selector.select(
            max(0.0, min(process.deadline_s for process in going) - time.monotonic())
        )
        if not events:
            for process in going:
                if process.deadline_s <= time.monotonic():
                    process.end()
        for key, _ in events:
            process = key.data
            if chunk := os.read(key.fd, 1 << 16):
                process.hear(chunk)
                continue
            selector.unregister(key.fd)
            process.process.wait()
            ended.append(process)
            if process.rank not in may_die and process.failure():
                for other in going:
                    other.hurry()
    return ended


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[Templates]:
    """What ranks and the servers of the lab's workers are forked from; nothing is started before
    the first one.
    """
    with closing(Templates()) as templates, pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat_lab.forking.ForkServer", from_template(templates))
        yield templates


@pytest.fixture
def run_ranks(tmp_path: Path, templates: Templates) -> RunRanks:
    """Runs a function in several processes, joined in a gloo group on loopback, and returns what
    each of them returned.

    `run_ranks(function, world_size, **arguments)` calls the module-level `function(rank,
    world_size, **arguments)` in each process. Results are JSON; so are arguments, in which
    functions and dataclasses may stand too. Ranks in `may_die`
    may end in any way; one that did not return gives None. A rank that raises, dies or takes longer
    than `timeout_s` (seconds, from when it has joined) fails the test with `RanksError`, which says
    which one and how. No process is left, whatever happens.
    """
    num_calls = 0

    def run(
        function: Callable[..., Any],
        world_size: int,
        *,
        timeout_s: float = 60.0,
        may_die: Collection[int] = (),
        **arguments: Any,
    ) -> list[Any]:
        __tracebackhide__ = True
        nonlocal num_calls
        num_calls += 1
        directory = tmp_path / f"ranks-{num_calls}"
        directory.mkdir()
        return launch(
            function,
            world_size,
            templates=templates,
            directory=directory,
            timeout_s=timeout_s,
            may_die=may_die,
            arguments=arguments,
        )

    return run
