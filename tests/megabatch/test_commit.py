"""Merges that are final for all or for none: random schedules of deaths, stops and newcomers. Each
is replayed by its seed.

In all of them nobody hangs, each sample is merged exactly once an epoch, and all that live have the
same bits after the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from group_support.rounds import Script, World, draw_script
from offbeat.errors import PeerError
from offbeat.membership.atomic_group import all_or_none
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.operations import Collective, Recv, Send


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        World(draw_script(seed)).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_has_a_model_as_soon_as_claims_are_computed(seed: int) -> None:
    """A claim takes up to 0.4 s, and news up to 0.3 s; all samples together take many seconds."""
    comes_at_s = {3: 1.0, 4: 4.0}
    sizes = {"num_samples": 6000, "mega_batches": 1, "epochs": 1}
    world = World(Script(seed=seed, founders=3, joiners=2, joins=comes_at_s, **sizes))
    world.run()
    assert world.over_at_s > 12
    for rank, at_s in comes_at_s.items():
        assert world.workers[rank].model_at_s - at_s < 2.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_ten_thousand_random_schedules(first: int) -> None:
    for seed in range(first, first + 500):
        World(draw_script(seed)).run()


class Entry:
    """The store's, for one piece of work."""

    def __init__(self) -> None:
        self.word: bool | None = None

    def __call__(self, *, done: bool) -> bool:
        self.word = done if self.word is None else self.word
        return self.word


def ring(rank: int, size: int) -> Collective[int]:
    """Everyone hears of everyone: the sum of all ranks."""
    for peer in range(size):
        if peer != rank:
            yield Send(peer, bytes([rank]))
    total = rank
    for peer in range(size):
        if peer != rank:
            total += (yield Recv(peer))[0]
    return total


def undisturbed(entry: Entry, size: int) -> list[int]:
    return VirtualCluster(size).run(
        [all_or_none(rank, size, ring(rank, size), entry) for rank in range(size)]
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_nobody_disturbs_is_done(size: int) -> None:
    entry = Entry()
    assert undisturbed(entry, size) == [sum(range(size))] * size
    assert entry.word


def test_what_somebody_has_given_up_is_done_for_nobody() -> None:
    entry = Entry()
    entry(done=False)
    with pytest.raises(PeerError, match="done again without the dead"):
        undisturbed(entry, 3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_during_the_commit_gives_all_survivors_the_same_result(when: str) -> None:
    """After the work, and before or after the dead member's last word: what the others hear of it
    is the same.
    """

    def dies() -> Collective[int]:
        yield from ring(2, 3)
        if when == "after":
            yield Send(
                1, bytes(8)
            )  # the first message of the round in which all learn that everyone has an outcome
        raise PeerError("killed", rank=2)

    for seed in range(20):
        entry = Entry()
        cluster = VirtualCluster(3, seed=seed, watch_all=False)
        works: list[Callable[[], Collective[int]]] = [lambda: ring(0, 3), lambda: ring(1, 3)]
        living = [all_or_none(rank, 3, work(), entry) for rank, work in enumerate(works)]
        outcomes = cluster.outcomes([*living, dies()])
        assert (
            outcomes[:2] == [3, 3]
            if entry.word
            else all(isinstance(outcome, PeerError) for outcome in outcomes[:2])
        )
