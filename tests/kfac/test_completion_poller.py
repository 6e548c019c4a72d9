"""A poller tells once of everything that is over, and leaves no thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from offbeat.kfac.spans import CompletionPoller
from offbeat.transport.driver import Pending
from offbeat.transport.operations import Post
from offbeat.transport.single_rank import SingleRank


class Held:
    """A ticket that is done when it is told to be."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        self.event.wait()


class Holding(SingleRank):
    """Hands out held tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[Held] = []

    def start(self, operation: object, channel: int) -> Held:  # type: ignore[override]
        self.tickets.append(Held())
        return self.tickets[-1]


def one_operation() -> Iterator[Post]:
    yield Post(b"")


@pytest.fixture
def poller() -> Iterator[CompletionPoller]:
    poller = CompletionPoller()
    yield poller
    poller.stop()


def launch(driver: Holding) -> Pending[None]:
    return driver.launch(one_operation(), 0)


def test_what_is_over_is_told_once_while_others_go_on(poller: CompletionPoller) -> None:
    driver, told, heard = Holding(), list[str](), threading.Event()
    pending = [launch(driver) for _ in range(3)]
    began_s = time.monotonic()
    times: list[float] = []

    def first(at_s: float) -> None:
        told.append("first")
        times.append(at_s)
        heard.set()

    poller.watch(pending[:2], first)
    poller.watch(pending[2:], lambda at_s: told.append("second"))
    driver.tickets[0].event.set()
    poller.poll()
    assert told == []
    driver.tickets[1].event.set()
    assert heard.wait(60)
    poller.poll()
    assert told == ["first"]
    assert began_s <= times[0] <= time.monotonic()
    driver.tickets[2].event.set()
    poller.stop()
    assert told == ["first", "second"]


def test_what_never_ends_keeps_no_thread(poller: CompletionPoller) -> None:
    told: list[float] = []
    poller.watch([launch(Holding())], told.append)
    poller.stop()
    assert told == []
    assert not [
        thread for thread in threading.enumerate() if thread.name == "offbeat-completion-poller"
    ]
    poller.watch([], told.append)
    assert len(told) == 1
