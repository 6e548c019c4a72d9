"""What waiting alone costs."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from _ceilings import Durations, on_first_call, periodic, with_neighbours
from offbeat_lab.cluster import Cluster, Straggling


@st.composite
def durations(draw: st.DrawFn) -> Durations:
    shape = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    return np.random.default_rng(draw(st.integers(0, 2**32))).uniform(0.5, 2.0, shape)


def everyone(num_ranks: int) -> NDArray[np.intp]:
    return np.tile(np.arange(num_ranks), (num_ranks, 1))


def with_stragglers(num_steps: int, seed: int = 0) -> Durations:
    """Eight ranks; two random ones come half a step late in each step, as the cluster
    draws them.
    """
    cluster = Cluster(workers=8, straggling=(Straggling(workers=2, delay_s=0.5),), seed=seed)
    table = np.ones((num_steps, 8))
    for step in range(num_steps):
        for rank, delay_s in cluster.delayed_ranks(step + 1).items():
            table[step, rank] += delay_s
    return table


def one_by_one(durations_s: Durations, period: int, quorum: int) -> list[float]:
    """`periodic` as events: the clock of each rank after its last meeting."""
    num_steps, num_ranks = durations_s.shape
    clock_s = [0.0] * num_ranks
    for begin in range(0, num_steps - period + 1, period):
        queue = [
            (clock_s[rank] + durations_s[begin, rank], rank, begin + 1) for rank in range(num_ranks)
        ]
        heapq.heapify(queue)
        arrived: list[int] = []
        while queue:
            now_s, rank, next_step = heapq.heappop(queue)
            if next_step < begin + period:
                heapq.heappush(queue, (now_s + durations_s[next_step, rank], rank, next_step + 1))
                continue
            arrived.append(rank)
            if len(arrived) == quorum:
                for there in arrived:
                    clock_s[there] = now_s
            elif len(arrived) > quorum:
                clock_s[rank] = now_s
    return clock_s


@given(durations(), st.data())
def test_meetings_are_what_a_queue_of_events_makes_of_them(
    table: Durations, data: st.DataObject
) -> None:
    period, quorum = (
        data.draw(st.integers(1, len(table))),
        data.draw(st.integers(1, table.shape[1])),
    )

    assert periodic(table, period=period, quorum=quorum).elapsed_s == pytest.approx(
        one_by_one(table, period, quorum)
    )


@given(durations())
def test_when_every_step_is_synchronous_it_takes_as_long_as_the_slowest_rank(
    table: Durations,
) -> None:
    assert periodic(table, period=1).mean == pytest.approx(table.mean() / table.max(axis=1).mean())


@given(durations())
def test_waiting_for_everybody_after_each_step_is_to_be_synchronous(table: Durations) -> None:
    assert with_neighbours(table, lambda step: everyone(table.shape[1])).elapsed_s == pytest.approx(
        periodic(table, period=1).elapsed_s
    )


@given(durations(), st.data())
def test_the_fewer_are_waited_for_the_further_everyone_gets(
    table: Durations, data: st.DataObject
) -> None:
    period = data.draw(st.integers(1, len(table)))

    reached = [
        periodic(table, period=period, quorum=quorum).by_rank
        for quorum in range(1, table.shape[1] + 1)
    ]

    assert reached[0] == pytest.approx(1.0)
    for further, less_far in pairwise(reached):
        assert (further >= less_far - 1e-12).all()


@given(durations(), st.data())
def test_nobody_waits_longer_than_a_step_for_a_meeting_it_is_called_to(
    table: Durations, data: st.DataObject
) -> None:
    period, quorum = (
        data.draw(st.integers(1, len(table))),
        data.draw(st.integers(1, table.shape[1])),
    )

    reached = on_first_call(table, period=period, quorum=quorum)

    num_meetings = np.ceil(reached.worked_s / (period * table.min()))
    assert (reached.elapsed_s - reached.worked_s <= num_meetings * table.max() + 1e-9).all()
    assert (reached.by_rank <= 1.0 + 1e-12).all()


def test_neighbours_hold_each_other_up_less_than_everybody_does() -> None:
    table, ranks = with_stragglers(400), np.arange(8)

    ring = with_neighbours(
        table, lambda step: np.column_stack([(ranks - 1) % 8, (ranks + 1) % 8])
    ).mean

    assert periodic(table, period=1).mean < ring < 1.0


def test_a_permanently_slow_rank_holds_nobody_up_where_a_quorum_is_enough() -> None:
    table = np.ones((100, 8))
    table[:, 3] = 2.0

    assert np.delete(periodic(table, period=10).by_rank, 3) == pytest.approx(0.5)
    assert np.delete(periodic(table, period=10, quorum=7).by_rank, 3) == pytest.approx(1.0)
    assert np.delete(on_first_call(table, period=10).by_rank, 3) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_two_ranks_of_eight_late_by_half_a_step_cost_what_was_calculated_before(seed: int) -> None:
    table = with_stragglers(2000, seed)

    assert periodic(table, period=1).mean == pytest.approx(0.750, abs=1e-9)
    assert periodic(table, period=10).mean == pytest.approx(0.910, abs=0.005)
    assert periodic(table, period=10, quorum=6).mean == pytest.approx(0.957, abs=0.005)
