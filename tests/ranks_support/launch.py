"""Starts real ranks, waits for all of them, and says which one failed and how."""

from __future__ import annotations

import inspect
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch.distributed as dist

from ranks_support.rank import Orders

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
"""Once a rank has failed, how long the others may take to say what they think of it before they are ended."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RanksFailed(Exception):
    """Some ranks did not return. The message has one paragraph for each, in the order in which they ended."""


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
    popen: subprocess.Popen[bytes]
    log: Path
    received: bytearray = field(default_factory=bytearray)
    ended_because: str = ""

    def end(self, reason: str) -> None:
        """End the process by a signal at which it prints its stacks; if it was told so before, by one it cannot ignore."""
        self.popen.send_signal(signal.SIGKILL if self.ended_because else signal.SIGABRT)
        self.popen.send_signal(signal.SIGCONT)
        self.ended_because = self.ended_because or reason

    @property
    def outcome(self) -> dict[str, Any]:
        """What the rank wrote before it ended: its value or its error; empty when it wrote nothing."""
        return dict(json.loads(self.received)) if self.received else {}

    def failure(self) -> str | None:
        """A paragraph that says how the rank failed; None when it returned."""
        printed = self.log.read_text(errors="replace").strip()
        if error := self.outcome.get("error"):
            return f"rank {self.rank} raised {error.strip().splitlines()[-1]}\n{error}{printed}"
        if self.ended_because:
            return f"rank {self.rank} {self.ended_because}, stack:\n{printed}"
        if self.popen.returncode < 0:
            return f"rank {self.rank} killed by {signal.Signals(-self.popen.returncode).name}\n{printed}"
        if self.popen.returncode > 0 or not self.outcome:
            return f"rank {self.rank} ended with status {self.popen.returncode}\n{printed}"
        return None


def launch(
    function: Callable[..., Any],
    world_size: int,
    *,
    directory: Path,
    timeout_s: float,
    may_die: Collection[int],
    arguments: dict[str, Any],
) -> list[Any]:
    """See the fixture `run_ranks`; `directory` takes what the ranks print."""
    source = inspect.getsourcefile(function)
    assert source is not None
    with ExitStack() as stack:
        # Given only an address, the store would listen on every interface.
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        selector = stack.enter_context(selectors.DefaultSelector())
        processes = []
        for rank in range(world_size):
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            orders = Orders(
                rank=rank,
                world_size=world_size,
                store_port=port,
                result_fd=writing,
                limit_s=timeout_s + 4 * GRACE_S,
                source=source,
                function=function.__name__,
                arguments=arguments,
            )
            process = stack.enter_context(started(orders, directory / f"rank-{rank}.log"))
            processes.append(process)
            selector.register(reading, selectors.EVENT_READ, process)
        ended = watch(selector, processes, timeout_s=timeout_s, may_die=may_die)
        del store
    failures = [failure for p in ended if p.rank not in may_die and (failure := p.failure())]
    if failures:
        raise RanksFailed("\n\n".join(failures))
    return [process.outcome.get("value") for process in processes]


@contextmanager
def started(orders: Orders, log: Path) -> Iterator[Process]:
    """A rank; it has ended when the block is left, whatever happened inside."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OFFBEAT_INTERFACE": LOOPBACK,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "ranks_support.rank", json.dumps(asdict(orders))]
    try:
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command, env=environment, pass_fds=[orders.result_fd], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
    finally:
        os.close(orders.result_fd)
    try:
        yield Process(rank=orders.rank, popen=popen, log=log)
    finally:
        popen.kill()
        popen.wait()


def watch(
    selector: selectors.BaseSelector, processes: list[Process], *, timeout_s: float, may_die: Collection[int]
) -> list[Process]:
    """Read the pipes until every rank has ended, or been ended. Returns the ranks in the order in which they ended."""
    ended: list[Process] = []
    reason = "hung"
    deadline_s = time.monotonic() + timeout_s
    while len(ended) < len(processes):
        events = selector.select(max(0.0, deadline_s - time.monotonic()))
        if not events:
            for process in processes:
                if process not in ended:
                    process.end(reason)
            deadline_s = time.monotonic() + GRACE_S
        for key, _ in events:
            process = key.data
            if chunk := os.read(key.fd, 1 << 16):
                process.received += chunk
                continue
            selector.unregister(key.fd)
            process.popen.wait()
            ended.append(process)
            if process.rank not in may_die and process.failure() and time.monotonic() + GRACE_S < deadline_s:
                reason = "was ended because another one had failed"
                deadline_s = time.monotonic() + GRACE_S
    return ended


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Runs a function in several processes, joined in a gloo group on loopback, and returns what each of them returned.

    `run_ranks(function, world_size, **arguments)` calls the module-level `function(rank, world_size, **arguments)` in each
    process; arguments and results are JSON. Ranks in `may_die` may end in any way; one that did not return gives None.
    A rank that raises, dies or takes longer than `timeout_s` (seconds) fails the test with `RanksFailed`, which says which
    one and how. No process is left, whatever happens.
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
        nonlocal num_calls
        num_calls += 1
        directory = tmp_path / f"ranks-{num_calls}"
        directory.mkdir()
        return launch(
            function, world_size, directory=directory, timeout_s=timeout_s, may_die=may_die, arguments=arguments
        )

    return run
