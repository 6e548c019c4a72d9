"""Random schedules of arrivals, delays, stops, cuts, rests and deaths. Each is replayed by its
seed.

In all of them no rank hangs, every living rank makes all its steps, and weights sum to 1 in each
average and each merge. All ranks that get an average get the same bits, which are the mean of what
its members contributed. No rank waits for one that computes, every rank that is asked for its model
answers, and no more bytes are sent than promised. Where no rank is lost, `delta` keeps the mean
over ranks, however late averages arrive, and whether or not values are rounded or
differences are coded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from group_support.world import Schedule, World, draw_coded, draw_rounded, draw_schedule


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 6):
        World(draw_schedule(seed)).run()


@pytest.mark.parametrize("first", range(200, 206, 6))
def test_random_schedules_with_rounded_values(first: int) -> None:
    for seed in range(first, first + 6):
        World(draw_rounded(seed)).run()


@pytest.mark.parametrize("first", range(300, 306, 6))
def test_random_schedules_with_coded_differences(first: int) -> None:
    for seed in range(first, first + 6):
        World(draw_coded(seed)).run()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("draw", [draw_schedule, draw_rounded, draw_coded])
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_ten_thousand_random_schedules(first: int, draw: Callable[[int], Schedule]) -> None:
    for seed in range(first, first + 500):
        World(draw(seed)).run()


@pytest.mark.parametrize("seed", [20])
def test_a_seed_replays_its_schedule(seed: int) -> None:
    worlds = [World(draw_schedule(seed)) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].cluster.now_s == worlds[1].cluster.now_s
    assert worlds[0].counts == worlds[1].counts
    for first, second in zip(worlds[0].models, worlds[1].models, strict=True):
        assert first.values.tobytes() == second.values.tobytes()
