"""Ranks of which some are dead agree: every living one gets the same answer, and none hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.run.coordination import (
    Coordinator,
    only_returned_ranks_step,
    publish_step,
    record_death,
)

DEADLINE_S = 60.0


def coordinators(world_size: int) -> tuple[dist.Store, list[Coordinator]]:
    store = dist.HashStore()
    return store, [
        Coordinator(store, rank, world_size, supervised=True) for rank in range(world_size)
    ]


@contextmanager
def together(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(num_threads) as pool:
        yield pool


def all_of(ranks: list[Coordinator], call: Callable[[Coordinator], object]) -> list[object]:
    """What `call` returns on each of `ranks` at once."""
    with together(len(ranks)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(call, rank) for rank in ranks]]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size - 1))
    )
)
def test_the_living_gather_without_the_dead(case: tuple[int, set[int]]) -> None:
    world_size, dead = case
    store, ranks = coordinators(world_size)
    for rank in dead:
        record_death(store, rank, deaths=1)
    living = [coordinator for coordinator in ranks if coordinator.rank not in dead]
    answers = all_of(
        living, lambda coordinator: coordinator.gather_living("point", f"from {coordinator.rank}")
    )
    assert answers == [
        {coordinator.rank: f"from {coordinator.rank}" for coordinator in living}
    ] * len(living)
    assert {coordinator.leader for coordinator in living} == {living[0].rank}


def test_what_one_said_before_it_died_counts() -> None:
    store, (first, second) = coordinators(2)
    store.set("offbeat-run/point/0", "my last words")
    record_death(store, first.rank, deaths=1)
    assert second.gather_living("point", "mine") == {0: "my last words", 1: "mine"}


def test_who_waits_goes_on_when_the_other_one_dies() -> None:
    store, (first, second) = coordinators(2)
    with together(1) as pool:
        waiting = pool.submit(first.gather_living, "point", "here")
        assert not waiting.done()
        record_death(store, 1, deaths=1)
        assert waiting.result(DEADLINE_S) == {0: "here"}
    assert second.gather_living("point", "too late") == {0: "here"}


def test_a_late_one_is_left_out_once_patience_ends_and_hears_so() -> None:
    _, (first, second) = coordinators(2)
    assert first.gather_living("point", "here", patience_s=0.0) == {0: "here"}
    assert second.gather_living("point", "late", patience_s=0.0) == {0: "here"}


def test_one_that_came_back_counts_from_its_first_step() -> None:
    store, (first, _) = coordinators(2)
    record_death(store, 1, deaths=1)
    again = Coordinator(store, 1, 2, restart=1, supervised=True)
    assert first.gather_living("before it is back", "") == {0: ""}
    again.rejoin_at(8)
    assert first.gather_living("step 7", "", step=7) == {0: ""}
    assert (
        all_of([first, again], lambda coordinator: coordinator.gather_living("step 8", "", step=8))
        == [{0: "", 1: ""}] * 2
    )
    assert (
        all_of([first, again], lambda coordinator: coordinator.gather_living("end", ""))
        == [{0: "", 1: ""}] * 2
    )
    record_death(store, 1, deaths=2)
    assert first.gather_living("step 9", "", step=9) == {0: ""}


def test_a_leader_that_came_back_does_not_take_over() -> None:
    store, (_, second) = coordinators(2)
    record_death(store, 0, deaths=1)
    again = Coordinator(store, 0, 2, restart=1, supervised=True)
    again.rejoin_at(3)
    assert (second.leader, again.leader) == (1, 1)
    record_death(store, 1, deaths=1)
    assert again.leader == 0


def test_what_a_dead_leader_did_not_do_the_next_one_does() -> None:
    store, (_, second, third) = coordinators(3)
    with together(2) as pool:
        answers = [pool.submit(one.must_perform, "summary", range(3)) for one in (second, third)]
        record_death(store, 0, deaths=1)
        assert answers[0].result(DEADLINE_S)
        second.publish("summary", "written")
        assert not answers[1].result(DEADLINE_S)


def test_what_a_leader_did_before_it_died_is_done() -> None:
    _, (first, second) = coordinators(2)
    assert first.must_perform("summary", range(2))
    first.publish("summary", "written")
    assert not second.must_perform("summary", range(2))
    assert second.published("something else") is None


def test_a_barrier_names_who_is_gone() -> None:
    store, (first, _) = coordinators(2)
    record_death(store, 1, deaths=1)
    with pytest.raises(PeerError, match="worker 1 did not come to 'written'") as raised:
        first.barrier("written", [0, 1])
    assert raised.value.rank == 1
    first.barrier("written alone", [0])


def test_where_nobody_notes_deaths_all_wait_for_all_and_rank_0_leads() -> None:
    store = dist.HashStore()
    ranks = [Coordinator(store, rank, 2) for rank in range(2)]
    assert (
        all_of(
            ranks,
            lambda coordinator: coordinator.gather_living("point", str(coordinator.rank)),
        )
        == [{0: "0", 1: "1"}] * 2
    )
    assert (
        all_of(ranks, lambda coordinator: coordinator.all_gather("all", str(coordinator.rank)))
        == [["0", "1"]] * 2
    )
    assert [coordinator.must_perform("summary", range(2)) for coordinator in ranks] == [True, False]


def test_a_rank_that_comes_back_is_told_how_far_the_others_are() -> None:
    store, (first, second) = coordinators(2)
    assert (first.step, second.step) == (0, 0)
    publish_step(store, 0, 34)
    publish_step(store, 1, 31)
    record_death(store, 1, deaths=1)
    assert Coordinator(store, 1, 2, restart=1, supervised=True).step == 34


def test_ranks_that_never_died_are_done_without_those_that_came_back() -> None:
    store, (first, second, third) = coordinators(3)
    record_death(store, 1, deaths=1)
    second.take_no_more_steps()
    first.take_no_more_steps()
    assert not only_returned_ranks_step(store, 3)
    third.take_no_more_steps()
    assert only_returned_ranks_step(store, 3)


def test_where_all_ranks_have_come_back_none_is_ended_for_the_others_sake() -> None:
    store, _ = coordinators(2)
    for rank in range(2):
        record_death(store, rank, deaths=1)
    assert not only_returned_ranks_step(store, 2)
