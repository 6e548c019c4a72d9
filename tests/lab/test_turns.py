"""Turns of a comparison: how long they are, what a rank waits at their end, and what is measured of
strategies in which some ranks can run ahead of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from offbeat.run.coordination import Coordinator, record_death
from offbeat_lab.compare import turn_steps
from offbeat_lab.pauses import Pauses, StepLimit, stop_at

AT_MOST_S = 60.0


class Ring:
    """Ranks that send to the next one after every step, over a link of their own, and step on when
    they have heard from the one before: as gossip does. Times are made up.
    """

    def __init__(self, compute_s: Sequence[float], transfer_s: Sequence[float]) -> None:
        self.compute_s = compute_s
        self.transfer_s = transfer_s
        self.link_free_s = [0.0] * len(compute_s)

    def train(self, begin_s: float, num_steps: int) -> list[float]:
        """When each rank has done so many steps, if all begin together."""
        size = len(self.compute_s)
        now_s = [begin_s] * size
        for _ in range(num_steps):
            sent_s = [now_s[rank] + self.compute_s[rank] for rank in range(size)]
            for rank in range(size):
                begins_s = max(sent_s[rank], self.link_free_s[rank])
                self.link_free_s[rank] = begins_s + self.transfer_s[rank]
            now_s = [max(sent_s[rank], self.link_free_s[rank - 1]) for rank in range(size)]
        return now_s

    def alone_s(self, num_steps: int) -> float:
        """Mean over ranks of a step's time where nothing interrupts the run."""
        self.link_free_s = [0.0] * len(self.compute_s)
        ends_s = self.train(0.0, num_steps)
        return sum(ends_s) / len(ends_s) / num_steps

    def by_turns_s(self, num_steps: int, turn_s: float, *, meets: bool) -> float:
        """The same in turns, of which each begins on a silent network. `meets`: whether ranks wait
        for the last one at the end of a turn.
        """
        size, done, now_s, step_s, met_s, total_s = len(self.compute_s), 0, 0.0, 0.0, 0.0, 0.0
        self.link_free_s = [0.0] * size
        while done < num_steps:
            now_s += 100.0  # the turns of others
            steps = min(turn_steps(turn_s, step_s, met_s), num_steps - done)
            ends_s = self.train(now_s, steps)
            last_s, done = max(ends_s), done + steps
            if meets and done < num_steps:
                met_s = last_s - min(ends_s)
                ends_s = [last_s] * size
            total_s += sum(ends_s) - size * now_s
            step_s, now_s = (last_s - now_s) / steps, last_s
        return total_s / size / num_steps


rings = st.integers(2, 6).flatmap(
    lambda size: st.builds(
        Ring,
        st.lists(st.floats(0.05, 0.5), min_size=size, max_size=size),
        st.lists(st.floats(0.01, 2.0), min_size=size, max_size=size),
    )
)


@given(rings, st.floats(0.1, 5.0))
def test_a_step_takes_as_long_by_turns_as_alone(ring: Ring, turn_s: float) -> None:
    alone_s = ring.alone_s(400)
    assert ring.by_turns_s(400, turn_s, meets=True) == pytest.approx(alone_s, rel=0.1)


def test_without_meeting_slow_links_catch_up_in_the_turns_of_others() -> None:
    """So that this model of a run shows what meeting is for."""
    links = [0.1, 0.1, 0.27, 0.27, 0.5, 0.5]
    ring = Ring([0.1] * 6, links)
    assert ring.by_turns_s(400, 1.0, meets=False) < 0.9 * ring.alone_s(400)


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0, 10))
def test_a_turn_takes_as_long_as_asked_and_twenty_times_what_its_end_takes(
    turn_s: float, step_s: float, met_s: float
) -> None:
    steps = turn_steps(turn_s, step_s, met_s)
    assert steps >= 1
    wanted_s = max(turn_s, 20 * met_s)
    assert (steps + 0.5) * step_s >= wanted_s * (1 - 1e-9)
    assert steps == 1 or (steps - 0.5) * step_s <= wanted_s * (1 + 1e-9)


# A turn's end


@contextmanager
def others(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def pauses_of(
    store: Any, rank: int, *, until: int = 4, meets: bool = True, target: int = 9
) -> tuple[Pauses, Coordinator]:
    coordinator = Coordinator(store, rank, 2, supervised=True)
    run: Any = SimpleNamespace(
        coordinator=coordinator,
        schedule=SimpleNamespace(target=target),
        attached=SimpleNamespace(session=SimpleNamespace(resting=nullcontext)),
    )
    stop: Any = SimpleNamespace(is_set=lambda: False)
    recorder: Any = None
    return Pauses(run, recorder, StepLimit(until), stop, meets=meets), coordinator


def test_a_turn_ends_when_the_last_rank_has_done_its_steps() -> None:
    store = dist.HashStore()
    (first, _), (second, coordinator) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting = pool.submit(first.meet, 4)
        while coordinator.published("pause/4/0") is None:
            pass
        assert not waiting.done()
        second.meet(4)
        assert waiting.result(AT_MOST_S) > 0


@pytest.mark.parametrize(
    "leaves",
    [
        lambda store, peer: record_death(store, 1, deaths=1),
        lambda store, peer: peer.take_no_more_steps(),
        lambda store, peer: stop_at(peer, 3),
    ],
    ids=["dies", "is done", "stops"],
)
def test_nobody_waits_for_a_rank_that_does_not_come(
    leaves: Callable[[Any, Coordinator], None],
) -> None:
    store = dist.HashStore()
    (first, _), (_, peer) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting: Future[float] = pool.submit(first.meet, 4)
        while peer.published("pause/4/0") is None:
            pass
        leaves(store, peer)
        waiting.result(AT_MOST_S)


def test_within_a_turn_at_the_end_of_a_run_and_without_exchange_nobody_waits() -> None:
    store = dist.HashStore()
    assert pauses_of(store, 0)[0].meet(3) == 0.0
    assert pauses_of(store, 0, target=4)[0].meet(4) == 0.0
    assert pauses_of(store, 0, meets=False)[0].meet(4) == 0.0
    assert pauses_of(store, 0, target=4)[0].meet(4, clocks_stop=True) == 0.0
    assert pauses_of(store, 0, meets=False)[0].meet(3, clocks_stop=True) == 0.0


def test_within_a_turn_ranks_wait_for_each_other_where_clocks_stop() -> None:
    store = dist.HashStore()
    (first, _), (second, coordinator) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting = pool.submit(first.meet, 3, clocks_stop=True)
        while coordinator.published("pause/3/0") is None:
            pass
        assert not waiting.done()
        second.meet(3, clocks_stop=True)
        assert waiting.result(AT_MOST_S) > 0
