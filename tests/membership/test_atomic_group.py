"""What a trainer hears from its group when it cannot go on. With real peers, see `tests/ranks`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from torch.distributed import HashStore

from offbeat.codec.wire import ByteBlocks
from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation, Member
from offbeat.membership.atomic_group import AtomicGroup, all_or_none
from offbeat.membership.generations import Generations
from offbeat.transport.driver import DONE, Driver, Finished, Ticket
from offbeat.transport.network import StoreLostError
from offbeat.transport.operations import Collective, Now, Operation, Send
from offbeat.transport.single_rank import SingleRank


def listed(number: int, *, newcomers: frozenset[int] = frozenset()) -> Generation:
    return Generation(
        number=number, members=(Member(rank=4, ticket=number),), newcomers=newcomers, tickets=number
    )


def number_of(generation: Generation, position: int) -> Collective[int]:
    yield Now()
    return generation.number


class Lost:
    """Work that loses a member in the generations that are `bad`."""

    def __init__(self, *bad: int, at: Callable[[], None] = lambda: None) -> None:
        self.bad, self.at = bad, at

    def __call__(self, generation: Generation, position: int) -> Collective[int]:
        yield Now()
        if generation.number in self.bad:
            self.at()
            raise PeerError("a member died", rank=1)
        return generation.number


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def group(told: list[str], store: HashStore) -> AtomicGroup:
    group = AtomicGroup(store, count=lambda driver: driver, notify=told.append, patience_s=10.0)
    group.begin(listed(0), 0, SingleRank())
    return group


def test_work_is_done_again_in_the_next_generation(group: AtomicGroup, told: list[str]) -> None:
    assert group.run(number_of) == 0
    assert group.run(Lost(0, at=lambda: group.begin(listed(3), 0, SingleRank()))) == 3
    assert told == ["generation 3: 1 worker, without worker 4 and with worker 4 come in"]


def test_it_waits_for_that_generation(
    group: AtomicGroup, in_thread: Callable[..., threading.Thread]
) -> None:
    lost = threading.Event()
    results: list[int] = []
    in_thread(lambda: results.append(group.run(Lost(0, at=lost.set)))).join(0)
    assert lost.wait(60)
    assert results == []
    thread = in_thread(group.begin, listed(1), 0, SingleRank())
    thread.join(60)
    assert group.run(number_of) == 1


def test_the_store_does_not_grow(group: AtomicGroup, store: HashStore) -> None:
    for _ in range(6):
        group.run(number_of)
    assert store.num_keys() == 2


@pytest.mark.parametrize(
    ("happens", "error", "said"),
    [
        (
            lambda group: group.lost_store("gone"),
            StoreLostError,
            "without the run's store: gone",
        ),
        (
            lambda group: group.retired("another one took its place"),
            PeerError,
            "another one took its place",
        ),
        (lambda group: group.close(), PeerError, "this session is closed"),
    ],
)
def test_what_ends_the_waiting(
    group: AtomicGroup, happens: Callable[[AtomicGroup], None], error: type[PeerError], said: str
) -> None:
    with pytest.raises(error, match=said):
        group.run(Lost(0, at=lambda: happens(group)))


def test_nobody_waits_for_ever(told: list[str], store: HashStore) -> None:
    impatient = AtomicGroup(store, count=lambda driver: driver, notify=told.append, patience_s=0.01)
    impatient.begin(listed(0), 0, SingleRank())
    with pytest.raises(PeerError, match="no next generation was met within 0.01 s"):
        impatient.run(Lost(0))


def test_a_store_that_is_back_is_lost_no_longer(told: list[str], store: HashStore) -> None:
    impatient = AtomicGroup(store, count=lambda driver: driver, notify=told.append, patience_s=0.01)
    impatient.begin(listed(0), 0, SingleRank())
    impatient.lost_store("gone")
    impatient.found_store()
    with pytest.raises(PeerError, match="no next generation was met within 0.01 s"):
        impatient.run(Lost(0))


def test_one_that_is_left_out_is_new_until_it_has_caught_up(group: AtomicGroup) -> None:
    group.expelled()
    assert group.is_new
    group.caught_up(listed(0))  # by what was done before
    assert group.is_new
    back = listed(2, newcomers=frozenset({0}))
    group.begin(back, 0, SingleRank())
    group.caught_up(listed(1))
    assert group.is_new
    group.caught_up(back)
    assert not group.is_new


def test_one_that_is_left_out_returns_when_its_trainer_has_come(
    group: AtomicGroup, in_thread: Callable[..., threading.Thread]
) -> None:
    group.expelled()
    assert not group.may_return()
    results: list[int] = []
    trainer = in_thread(lambda: results.append(group.run(number_of)))
    while not group.may_return():
        assert trainer.is_alive()
    group.begin(listed(1, newcomers=frozenset({0})), 0, SingleRank())
    trainer.join(60)
    assert results == [1]
    assert not group.may_return()


def of_ranks(
    number: int, ranks: Sequence[int], *, newcomers: frozenset[int] = frozenset()
) -> Generation:
    members = tuple(Member(rank=rank, ticket=0) for rank in ranks)
    return Generation(number=number, members=members, newcomers=newcomers, tickets=0)


def test_peers_know_of_newcomers_until_these_have_a_model_or_are_gone(group: AtomicGroup) -> None:
    assert not group.has_newcomers
    group.begin(of_ranks(1, (4, 7), newcomers=frozenset({1})), 0, SingleRank())
    assert group.has_newcomers
    group.begin(of_ranks(2, (4, 7, 9), newcomers=frozenset({2})), 0, SingleRank())
    group.caught_up(of_ranks(0, (4,)))  # by what was done before they came
    assert group.has_newcomers
    group.begin(of_ranks(3, (4, 7)), 0, SingleRank())  # one of them died, the other still waits
    assert group.has_newcomers
    group.caught_up(of_ranks(3, (4, 7)))
    assert not group.has_newcomers
    group.begin(of_ranks(4, (4, 9), newcomers=frozenset({1})), 0, SingleRank())
    assert group.has_newcomers
    group.begin(of_ranks(5, (4,)), 0, SingleRank())
    assert not group.has_newcomers


class FakeGenerations:
    """What it was told at its end."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def close(self, *, over: bool) -> None:
        self.told.append(over)


@pytest.mark.parametrize(("ranks", "is_last"), [((4,), True), ((4, 7), False)])
def test_who_leaves_last_says_that_the_run_is_over(
    group: AtomicGroup, ranks: Sequence[int], is_last: bool
) -> None:
    membership = FakeGenerations()
    group.enter(lambda host: cast(Generations, membership), lambda: None)
    group.begin(of_ranks(1, ranks), 0, SingleRank())
    group.leave()
    group.leave()  # by now it is a member no longer
    assert membership.told == [is_last, False]


def test_who_fails_is_a_member_no_longer_and_says_nothing_of_the_run(group: AtomicGroup) -> None:
    membership = FakeGenerations()
    group.enter(lambda host: cast(Generations, membership), lambda: None)
    group.abort("it has failed")
    assert membership.told == [False]
    with pytest.raises(PeerError, match="this session is closed"):
        group.run(number_of)


class ClosedAfterOneMessage(Driver):
    """A member of three whose peers have sent all, and whose own second message comes too late."""

    rank, world_size = 0, 3

    def __init__(self) -> None:
        self._num_sent = 0

    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, Send):
            self._num_sent += 1
            if self._num_sent > 1:
                raise PeerError("rank 0 has closed its connections")
            return DONE
        return Finished(ByteBlocks.join([b""]))

    def close(self) -> None:
        pass


def test_whose_connections_close_between_two_messages_reads_what_was_settled() -> None:
    said: list[str] = []

    def work() -> Collective[str]:
        yield Now()
        return "outcome"

    def is_done(word: str) -> bool:
        said.append(word)
        return True  # a peer had everything, and has written so

    assert ClosedAfterOneMessage().run(all_or_none(0, 3, work(), is_done), 0) == "outcome"
    assert said == ["void"]
