"""The limit lets a worker train as far as it was told, wakes it at once when that changes, and lets
it give up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from offbeat_lab.pauses import StepLimit

AT_MOST_S = 60.0


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


def waiting_at_step_3(
    pool: ThreadPoolExecutor, give_up: threading.Event
) -> tuple[StepLimit, Future[None], Watched]:
    """A limit of three steps, and a worker that has done them and waits for more."""
    condition = Watched()
    limit = StepLimit(3, condition)
    future = pool.submit(limit.wait_beyond, 3, give_up)
    assert condition.waiting.wait(AT_MOST_S)
    return limit, future, condition


def test_a_limit_is_reached_at_the_step_it_names_and_beyond() -> None:
    limit = StepLimit(2)
    assert [limit.is_reached(steps_done) for steps_done in range(4)] == [False, False, True, True]
    limit.raise_to(3)
    assert [limit.is_reached(steps_done) for steps_done in range(4)] == [False, False, False, True]


def test_no_limit_is_never_reached() -> None:
    limit = StepLimit.unlimited()
    assert not limit.is_reached(10**12)
    limit.wait_beyond(10**12, threading.Event())


def test_waiting_where_there_is_nothing_to_wait_for_returns() -> None:
    StepLimit(1).wait_beyond(0, threading.Event())
    gave_up = threading.Event()
    gave_up.set()
    StepLimit(0).wait_beyond(0, gave_up)


def test_a_raised_limit_lets_the_worker_on(pool: ThreadPoolExecutor) -> None:
    limit, future, _ = waiting_at_step_3(pool, threading.Event())
    limit.raise_to(3)  # no step more than before
    assert not future.done()
    limit.raise_to(4)
    future.result(AT_MOST_S)


def test_a_worker_that_is_to_stop_gives_up_waiting(pool: ThreadPoolExecutor) -> None:
    give_up = threading.Event()
    limit, future, condition = waiting_at_step_3(pool, give_up)
    give_up.set()  # by a signal handler, which may not take a lock
    future.result(AT_MOST_S)
    assert limit.is_reached(3)
    # It looks again now and then, since nobody wakes it, but it does not spin.
    assert all(patience_s is not None and patience_s >= 0.05 for patience_s in condition.patience_s)
