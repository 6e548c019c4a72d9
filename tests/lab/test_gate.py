"""The gate lets a worker train as far as it was told, wakes it at once when that changes, and lets
it give up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from offbeat.lab.gate import Gate

AT_MOST_S = 10.0


class Watched(threading.Condition):
    """A condition that says when somebody begins to wait on it, and counts how often somebody
    looked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self.num_waits = 0
        self.patience_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        self.patience_s.append(timeout)
        self.waiting.set()
        return super().wait(timeout)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def waiting_at(
    gate: Gate, pool: ThreadPoolExecutor, give_up: threading.Event
) -> tuple[Future[None], Watched]:
    """Somebody who has done three steps and stands before `gate`."""
    condition = Watched()
    gate._moved = condition
    future = pool.submit(gate.wait, 3, give_up)
    assert condition.waiting.wait(AT_MOST_S)
    return future, condition


def test_a_gate_is_closed_at_the_step_it_names_and_beyond() -> None:
    gate = Gate(2)
    assert [gate.closed(steps_done) for steps_done in range(4)] == [False, False, True, True]
    gate.move(3)
    assert [gate.closed(steps_done) for steps_done in range(4)] == [False, False, False, True]


def test_an_open_gate_is_never_closed() -> None:
    gate = Gate.open()
    assert not gate.closed(10**12)
    gate.wait(10**12, threading.Event())


def test_waiting_where_there_is_nothing_to_wait_for_returns() -> None:
    Gate(1).wait(0, threading.Event())
    gave_up = threading.Event()
    gave_up.set()
    Gate(0).wait(0, gave_up)


def test_moving_the_gate_lets_the_worker_on(pool: ThreadPoolExecutor) -> None:
    gate = Gate(3)
    future, _ = waiting_at(gate, pool, threading.Event())
    gate.move(3)  # no step more than before
    assert not future.done()
    gate.move(4)
    future.result(AT_MOST_S)


def test_a_worker_that_is_to_stop_gives_up_waiting(pool: ThreadPoolExecutor) -> None:
    gate, give_up = Gate(3), threading.Event()
    future, condition = waiting_at(gate, pool, give_up)
    give_up.set()  # by a signal handler, which may not take a lock
    future.result(AT_MOST_S)
    assert gate.closed(3)
    # It looks again now and then, since nobody wakes it, but it does not spin.
    assert all(patience_s is not None and patience_s >= 0.05 for patience_s in condition.patience_s)
