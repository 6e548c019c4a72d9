"""How long the interval between two averages of a group is, where ranks choose it together."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from group_support.training import PARAMETERS, Training, TrainingWorld
from offbeat.arithmetic.groups import VersionGroup
from offbeat.arithmetic.version_numbers import VersionNumbers
from offbeat.averaging.background.interval_choice import IntervalChoice, wished_interval
from offbeat.averaging.background.interval_watch import IntervalWatch
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.model_state import ModelState
from offbeat.averaging.background.processor_time import ProcessorTime, read_processor_time
from offbeat.averaging.background.published_model import PublishedModel
from offbeat.strategies.wagma import WAGMA
from offbeat.transport.virtual import VirtualLink

STRATEGY = WAGMA(interval="auto", period=6)
WORLD_SIZE = 5


def train(
    wish: Callable[[int, int], int], *, seed: int = 0, steps: int = 60, slow: float = 1.0
) -> TrainingWorld:
    """Rank 0 takes `slow` times as long for each step as the others."""

    def compute_s(rank: int, step: int) -> float:
        usual_s = 0.8 + 0.4 * random.Random(f"{seed} {rank} {step}").random()
        return usual_s * (slow if rank == 0 else 1.0)

    def group_of(version: int, rank: int) -> VersionGroup:
        return STRATEGY.group_of(version, rank, WORLD_SIZE)

    world = TrainingWorld(
        Training(
            seed=seed,
            world_size=WORLD_SIZE,
            num_steps=steps,
            group_of=group_of,
            compute_s=compute_s,
            numbers=STRATEGY.numbers,
            wish=wish,
            link=VirtualLink(latency_s=1e-3),
        )
    )
    world.run()
    return world


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_all_ranks_take_the_median_of_their_wishes(slow: float) -> None:
    wishes = [1, 2, 3, 3, 2]
    world = train(lambda rank, step: wishes[rank], slow=slow)
    assert [rank.intervals[0] for rank in world.ranks] == [1] * WORLD_SIZE
    assert [rank.intervals[-1] for rank in world.ranks] == [2] * WORLD_SIZE


def test_without_wishes_the_interval_stays() -> None:
    world = train(lambda rank, step: 0)
    assert {interval for rank in world.ranks for interval in rank.intervals} == {1}


def test_a_longer_interval_saves_averages() -> None:
    often, seldom = (train(lambda rank, step, wish=wish: wish) for wish in (1, 3))
    made = [
        sum(rank.published.trainer.counts.made for rank in world.ranks) for world in (often, seldom)
    ]
    assert made[1] < made[0] / 2


@pytest.mark.parametrize("seed", range(12))
def test_the_mean_over_ranks_stays_however_they_change_their_minds(seed: int) -> None:
    draw = random.Random(seed)
    wishes = {(rank, step): draw.choice([0, 1, 2, 3]) for rank in range(5) for step in range(30)}
    world = train(
        lambda rank, step: wishes[rank, step], seed=seed, steps=30, slow=draw.choice([1.0, 2.5])
    )
    ends = [rank.published.trainer.take().values[PARAMETERS] for rank in world.ranks]
    pushed = [np.sum(rank.pushes, axis=0) for rank in world.ranks]
    np.testing.assert_allclose(np.sum(ends, axis=0), np.sum(pushed, axis=0), rtol=1e-9, atol=1e-9)


def test_a_rank_forgets_the_wishes_of_the_dead_and_of_an_old_generation() -> None:
    choice = IntervalChoice(VersionNumbers(6, (1, 2, 3)))
    for member in range(3):
        choice.hear(member, 3)
    choice.forget(0)
    choice.forget(1)
    choice.hear(3, 2)
    choice.close(STRATEGY.period - 1)
    assert choice.interval == 1  # not a global synchronization: there are more numbers in a period
    choice.close(choice.numbers.in_a_period - 1)
    assert choice.interval == 2
    choice.begin_generation()
    choice.close(choice.numbers.in_a_period - 1)
    assert choice.interval == 2


@pytest.mark.parametrize("foreign", [4, 7, 255])
def test_an_interval_that_is_not_possible_is_not_heard(foreign: int) -> None:
    choice = IntervalChoice(VersionNumbers(6, (1, 2, 3)))
    choice.hear(1, foreign)
    choice.close(choice.numbers.in_a_period - 1)
    assert choice.interval == 1


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.04, 0.06, 0.3])
def test_wishes_come_to_rest_where_the_cost_follows_from_the_interval(cost: float) -> None:
    """`cost`: of an average in each step."""
    interval, seen = 1, []
    for _ in range(8):
        interval = wished_interval(interval, cost / interval, budget=0.05, intervals=(1, 2, 5, 10))
        seen.append(interval)
    assert seen[-1] == seen[-2]
    assert cost / interval <= 0.05 or interval == 10


def watched(costs: list[float]) -> tuple[list[int], list[str]]:
    """The wishes after each ten steps, of which averages took such shares, and the remarks."""
    published = PublishedModel(
        ModelState(DeltaMerge), intervals=IntervalChoice(VersionNumbers(10, (1, 2, 5)))
    )
    now = ProcessorTime(0.0, 0.0, 0.0, 0.0)
    remarks: list[str] = []

    def read() -> ProcessorTime:
        return now

    watch = IntervalWatch(
        published.trainer,
        read,
        intervals=(1, 2, 5),
        period=10,
        budget=0.05,
        inform=remarks.append,
    )
    watch.end_step()
    wishes = []
    for cost in costs:
        # Averages take half of the processor time of a rank that waits for twice `cost`.
        now = ProcessorTime(
            now.now_s + 10, now.waited_s + 20 * cost, now.averaging_s + 1, now.process_s + 2
        )
        for _ in range(10):
            watch.end_step()
        wishes.append(published.intervals.wish)
    return wishes, remarks


def test_a_rank_wishes_to_average_less_often_where_that_costs_more_than_allowed() -> None:
    assert watched([0.04, 0.06, 0.01]) == ([1, 2, 1], [])


def test_where_the_system_tells_nothing_a_rank_wishes_nothing_and_says_so() -> None:
    published = PublishedModel(ModelState(DeltaMerge))
    remarks: list[str] = []
    watch = IntervalWatch(
        published.trainer,
        lambda: None,
        intervals=(1,),
        period=10,
        budget=0.05,
        inform=remarks.append,
    )
    for _ in range(40):
        watch.end_step()
    assert published.intervals.wish == 0
    assert len(remarks) == 1
    assert "does not tell" in remarks[0]


def test_threads_that_do_not_exist_have_no_processor_time() -> None:
    assert read_processor_time(2**30, ()) is None
