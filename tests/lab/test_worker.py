"""No rank of a compared script trains on while the leader evaluates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.run.coordination import Coordinator, record_death
from offbeat_lab.worker import EvaluationPause


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def pauses(store: Any, world_size: int = 2, **options: Any) -> Iterator[EvaluationPause]:
    for rank in range(world_size):
        coordinator = Coordinator(store, rank, world_size, supervised=True)
        yield EvaluationPause(coordinator, **{"inform": pytest.fail, **options})


def test_a_rank_that_has_done_as_many_steps_begins_none_before_the_evaluation_is_over(
    store: Any,
) -> None:
    leader, other = pauses(store)
    other.step_done(5, 1.0)
    leader.begin(5, 1.0)
    happened = []

    def go_on() -> None:
        other.wait(5)
        happened.append("step 6")

    thread = threading.Thread(target=go_on)
    thread.start()
    happened.append("evaluated")
    leader.end()
    thread.join()
    assert happened == ["evaluated", "step 6"]


def test_the_leader_waits_for_a_rank_that_is_behind_and_the_time_is_that_rank_s(
    store: Any,
) -> None:
    leader, other = pauses(store, patience_s=60.0)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(leader.begin(3, 1.5)))
    thread.start()
    for step in (1, 2, 3):
        other.wait(step - 1)  # would wait for ever if it were held for what it lacks
        other.step_done(step, 1.0 * step)
    thread.join()
    assert found == [3.0]
    leader.end()


def test_nobody_waits_for_the_dead(store: Any) -> None:
    leader, other, dead = pauses(store, world_size=3, patience_s=60.0)
    record_death(store, 2, deaths=1)
    other.step_done(4, 2.0)
    assert leader.begin(4, 1.0) == 2.0
    record_death(store, 0, deaths=1)
    other.wait(4)
    assert dead.is_evaluating is False


def test_a_leader_that_is_not_followed_evaluates_and_says_so_once(store: Any) -> None:
    told: list[str] = []
    leader, other = pauses(store, patience_s=0.0, inform=told.append)
    other.step_done(3, 0.5)
    assert [leader.begin(step, 1.0) for step in (7, 8)] == [1.0, 1.0]
    (notice,) = told
    assert notice.startswith("what was measured after 7 steps is of a model with fewer")
    assert "3 steps of worker 1" in notice
