"""Processes beside the ranks of a job: one that a test starts itself, and one that a job asks for
as if a launcher started a worker anew.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from offbeat_lab.forking import ForkedProcess
from ranks_support import references
from ranks_support.launch import START_S, Place, launch_in_places, started
from ranks_support.rank import LOOPBACK, STORE_PORT_VARIABLE, Orders
from ranks_support.templates import Templates


class StartProcess(Protocol):
    """The fixture `start_process`."""

    def __call__(
        self, function: Callable[..., Any], rank: int, world_size: int, **arguments: Any
    ) -> ForkedProcess: ...


@pytest.fixture
def start_process(templates: Templates, tmp_path: Path) -> Iterator[StartProcess]:
    """Has `function(rank, world_size, **arguments)` called in a process of its own, in no group. It
    is killed at the end of the test.
    """
    numbers = count()
    with ExitStack() as stack:

        def start(
            function: Callable[..., Any], rank: int, world_size: int, **arguments: Any
        ) -> ForkedProcess:
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            orders = Orders(
                rank=rank,
                world_size=world_size,
                store_port=0,
                result_fd=writing,
                limit_s=10 * START_S,
                job=references.dumps({"function": function, "arguments": arguments}),
            )
            log = tmp_path / f"process-{next(numbers)}.log"
            process = started(templates, orders, log, START_S, Place())
            return stack.enter_context(process).process

        yield start


class Newcomer:
    """One that runs a function as soon as a job has asked for it.

    Attributes:
        wanted: what a job hands to `ask_for`.
    """

    def __init__(
        self, function: Callable[..., Any], directory: Path, templates: Templates, **arguments: Any
    ) -> None:
        directory.mkdir()
        self.wanted = directory / "wanted"
        os.mkfifo(self.wanted)
        self._values: list[Any] = []
        self._errors: list[BaseException] = []

        def run() -> None:
            request = self.wanted.read_text()  # waits for a writer
            if not request:
                return
            try:
                self._values += launch_in_places(
                    function,
                    [Place(environment=json.loads(request))],
                    templates=templates,
                    directory=directory,
                    arguments=arguments,
                )
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                self._errors.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def value(self) -> Any:
        """What the function has returned; waits for its end."""
        self.close()
        if self._errors:
            raise self._errors[0]
        assert self._values, "no job has asked for it"
        return self._values[0]

    def close(self) -> None:
        if self._thread.is_alive():
            os.close(os.open(self.wanted, os.O_RDWR | os.O_NONBLOCK))  # nobody will ask any more
        self._thread.join()


class ExpectNewcomer(Protocol):
    """The fixture `expect_newcomer`."""

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> Newcomer: ...


@pytest.fixture
def expect_newcomer(templates: Templates, tmp_path: Path) -> Iterator[ExpectNewcomer]:
    """Has `function(0, 1, **arguments)` called in a new process when a job calls `ask_for`."""
    expected: list[Newcomer] = []

    def expect(function: Callable[..., Any], **arguments: Any) -> Newcomer:
        directory = tmp_path / f"newcomer-{len(expected)}"
        expected.append(Newcomer(function, directory, templates, **arguments))
        return expected[-1]

    yield expect
    for newcomer in expected:
        newcomer.close()


def pause() -> None:
    """Emulated computation between two looks at what a peer has done: whoever would look without a
    pause keeps the core busy that the peer needs.
    """
    threading.Event().wait(0.005)


def ask_for(wanted: str, environment: Mapping[str, str]) -> None:
    """Have the newcomer of this path started, with these variables in its environment."""
    Path(wanted).write_text(json.dumps(dict(environment)))


def launcher_environment(rank: int, world_size: int) -> dict[str, str]:
    """What a launcher would set for `rank`, were it started beside the calling rank of a test."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": os.environ[STORE_PORT_VARIABLE],
    }
