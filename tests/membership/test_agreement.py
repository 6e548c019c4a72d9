"""What members agree on, and entries of the store that are damaged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store, TCPStore

from fuzz_support import LONG_NUMBER, NESTED, altered_text, succeeds_or_refuses
from offbeat.errors import MismatchError, OffbeatError, WireError
from offbeat.membership.agreement import MAX_GAP_S, Generation, Member, Membership, successor
from offbeat.transport.network import OwnStore, StoreLostError, create_network, find_network

# Who stays, who goes, and what the store says of it.


NOBODY: frozenset[int] = frozenset()


def generation_of(
    size: int, *, number: int = 0, newcomers: frozenset[int] = NOBODY, tickets: int = 0
) -> Generation:
    return Generation(
        number=number,
        members=tuple(Member(r, 0) for r in range(size)),
        newcomers=newcomers,
        tickets=tickets,
    )


@st.composite
def views(draw: st.DrawFn) -> tuple[Generation, int, frozenset[int], frozenset[int], list[Member]]:
    """A generation as one of its members sees it."""
    size = draw(st.integers(1, 9))
    others = st.frozensets(st.integers(0, size - 1))
    tickets = draw(st.integers(0, 3))
    ranks = draw(st.lists(st.integers(0, size + 2), max_size=4))
    requests = [Member(rank, tickets + 1 + number) for number, rank in enumerate(ranks)]
    return (
        generation_of(size, number=7, tickets=tickets),
        draw(st.integers(0, size - 1)),
        draw(others),
        draw(others),
        requests,
    )


@given(views())
def test_a_successor_holds_those_who_are_reached_and_those_who_ask(
    view: tuple[Generation, int, frozenset[int], frozenset[int], list[Member]],
) -> None:
    generation, me, unreachable, silent, requests = view
    after = successor(generation, me=me, unreachable=unreachable, silent=silent, requests=requests)
    if after is None:
        return
    assert after.number == generation.number + 1
    assert after.tickets == generation.tickets + len(requests)
    asking = {request.rank for request in requests}
    reached = [
        member
        for position, member in enumerate(generation.members)
        if position not in unreachable or position == me
    ]
    old = [member for member in after.members if member.ticket == 0]
    new = set(after.members) - set(old)
    assert old == [member for member in reached if member.rank not in asking]
    assert {member.rank for member in after.members} == {member.rank for member in old} | asking
    assert len({member.rank for member in after.members}) == after.size
    assert {after.members[position] for position in after.newcomers} == new
    assert all(
        member.ticket == max(request.ticket for request in requests if request.rank == member.rank)
        for member in new
    )


@given(st.integers(1, 12), st.data())
def test_of_two_sides_of_a_cut_exactly_one_goes_on(size: int, data: st.DataObject) -> None:
    generation = generation_of(size)
    everyone = frozenset(range(size))
    left = data.draw(st.frozensets(st.integers(0, size - 1), min_size=1))
    right = everyone - left
    going_on = [
        [
            successor(generation, me=me, unreachable=everyone - side, silent=NOBODY, requests=())
            for me in sorted(side)
        ]
        for side in (left, right)
        if side != everyone
    ]
    winners = [side for side in going_on if any(side)]
    assert len(winners) == (1 if right else 0)
    for side in winners:
        assert len(set(side)) == 1  # and it agrees without a word


@given(st.integers(1, 12), st.data())
def test_whoever_is_left_goes_on_once_the_others_are_silent(size: int, data: st.DataObject) -> None:
    me = data.draw(st.integers(0, size - 1))
    others = frozenset(range(size)) - {me}
    after = successor(generation_of(size), me=me, unreachable=others, silent=others, requests=())
    assert after == (
        None
        if size == 1
        else Generation(number=1, members=(Member(me, 0),), newcomers=NOBODY, tickets=0)
    )


@given(st.integers(1, 12), st.data())
def test_silence_alone_is_no_reason_to_go(size: int, data: st.DataObject) -> None:
    silent = data.draw(st.frozensets(st.integers(0, size - 1)))
    assert (
        successor(generation_of(size), me=0, unreachable=NOBODY, silent=silent, requests=()) is None
    )


def test_a_member_that_alone_is_cut_off_cannot_vote_the_others_out_nor_let_anybody_in() -> None:
    alone = {"me": 0, "unreachable": frozenset({1, 2}), "silent": NOBODY}
    assert successor(generation_of(3), requests=(), **alone) is None  # type: ignore[arg-type]
    assert successor(generation_of(3), requests=[Member(5, 1)], **alone) is None  # type: ignore[arg-type]


def test_newcomers_of_a_generation_that_never_began_stay_newcomers() -> None:
    waiting = generation_of(4, newcomers=frozenset({2, 3}))
    seen = {"me": 0, "unreachable": frozenset({1}), "silent": frozenset({1}), "requests": ()}
    begun, not_begun = (successor(waiting, begun=begun, **seen) for begun in (True, False))  # type: ignore[arg-type]
    assert begun is not None
    assert not_begun is not None
    assert begun.newcomers == NOBODY
    assert not_begun.newcomers == {1, 2}


@pytest.fixture
def store() -> Store:
    return HashStore()


def test_founding_is_the_same_whoever_comes_first(store: Store) -> None:
    first, second = Membership(store), Membership(store)
    assert first.description() is None
    assert (
        first.create_run(3, "a model")
        == second.create_run(3, "a model")
        == generation_of(3)
        == second.latest()
    )
    assert second.description() == "a model"
    with pytest.raises(MismatchError, match="another rank founded"):
        Membership(store).create_run(3, "another model")


def test_the_first_proposal_stands(store: Store) -> None:
    first, second = Membership(store), Membership(store)
    founding = first.create_run(3, "")
    without_2, without_1 = (
        successor(founding, me=0, unreachable=frozenset({gone}), silent=NOBODY, requests=())
        for gone in (2, 1)
    )
    assert without_2 is not None
    assert without_1 is not None
    assert second.next_of(founding) is None
    assert first.propose(without_2) == without_2
    assert second.propose(without_1) == without_2
    assert second.next_of(founding) == without_2 == second.latest()


def test_requests_are_numbered_without_gaps_and_wait_until_they_are_answered(store: Store) -> None:
    member = Membership(store)
    founding = member.create_run(1, "")
    assert [Membership(store).request(rank) for rank in (4, 4, 0)] == [1, 2, 3]
    assert member.waiting(founding) == (Member(4, 1), Member(4, 2), Member(0, 3))
    assert member.waiting(generation_of(1, tickets=2)) == (Member(0, 3),)


def test_silence_is_what_this_process_has_listened_to(store: Store) -> None:
    now_s = 100.0
    watching = Membership(store, clock=lambda: now_s)
    founding = watching.create_run(3, "")
    beating = Membership(store)
    assert watching.silent_s(founding) == (0.0, 0.0, 0.0)
    now_s += 0.5
    beating.beat(founding.members[1])
    assert watching.silent_s(founding) == (0.5, 0.0, 0.5)
    now_s += 3600.0  # stopped, or waiting for the store: it heard nothing because it did not listen
    beating.deregister(founding.members[2])
    assert watching.silent_s(founding) == (0.5 + MAX_GAP_S, MAX_GAP_S, math.inf)
    beating.beat(founding.members[0])
    assert watching.silent_s(founding)[0] == 0.0


def test_endpoints_come_one_by_one(store: Store) -> None:
    member = Membership(store)
    founding = member.create_run(2, "")
    assert member.endpoints(founding) == (None, None)
    member.publish_endpoint(founding, 1, "tcp://127.0.0.1:5")
    assert member.endpoints(founding) == (None, "tcp://127.0.0.1:5")
    member.publish_endpoint(founding, 0, "tcp://127.0.0.1:4")
    assert member.endpoints(founding) == ("tcp://127.0.0.1:4", "tcp://127.0.0.1:5")


class AskedStore(HashStore):
    """Writes down which entries it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def check(self, keys: list[str]) -> bool:
        self.asked.append(keys)
        return super().check(keys)


def test_who_waits_for_the_last_of_many_endpoints_asks_for_it_alone() -> None:
    store, founding = AskedStore(), generation_of(64)
    member = Membership(store)
    for position in set(range(64)) - {40}:
        member.publish_endpoint(founding, position, "tcp://127.0.0.1:5")
    assert member.num_published(founding) == 40
    assert member.unpublished(founding, frozenset({3, 40, 63})) == {40}
    store.asked.clear()
    assert member.num_published(founding, 40) == 40
    assert store.asked == [["endpoint/0/40"]]
    store.asked.clear()
    assert member.endpoints(founding).count(None) == 1
    assert len(store.asked) <= 13
    member.publish_endpoint(founding, 40, "tcp://127.0.0.1:4")
    assert member.num_published(founding, 40) == 64
    assert None not in member.endpoints(founding)


def test_a_run_ends_once(store: Store) -> None:
    member = Membership(store)
    assert not member.is_over()
    member.end_run()
    assert Membership(store).is_over()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nonsense", "is damaged"),
        ("[1]", "is damaged"),
        (json.dumps({"version": 1, "members": []}), "is damaged"),
        (json.dumps({"version": 1, "members": [], "newcomers": [], "tickets": 0}), "is damaged"),
        (
            json.dumps({"version": 1, "members": [[0, 0], [0, 1]], "newcomers": [], "tickets": 0}),
            "is damaged",
        ),
        (
            json.dumps({"version": 1, "members": [[0, 0]], "newcomers": [1], "tickets": 0}),
            "is damaged",
        ),
        (json.dumps({"version": 2}), "has version 2, this program reads 1"),
    ],
)
def test_a_damaged_entry_is_one_clear_error(store: Store, entry: str, message: str) -> None:
    store.set("generation/0", entry)
    with pytest.raises(WireError, match=message):
        Membership(store).latest()


def test_a_damaged_beat_is_too(store: Store) -> None:
    store.set("beat/0/0", "lub-dub")
    with pytest.raises(WireError, match="'beat/0/0' is damaged"):
        Membership(store).silent_s(generation_of(1))


def test_a_store_that_ended_has_one_name() -> None:
    serving = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = serving.port
    own = OwnStore(
        lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
        port=port,
        limit_s=20,
    )
    member = Membership(own)
    founding = member.create_run(1, "")
    del serving
    for ask in (
        lambda: member.beat(founding.members[0]),
        member.is_over,
        lambda: member.endpoints(founding),
    ):
        with pytest.raises(StoreLostError, match="has the process that serves it ended"):
            ask()


# Entries of the store that somebody else wrote are read or refused.


SECRET = b"a secret of this test run only"
WITH_INFINITY = '{"version": 1, "rank": 1e400}'
ENTRIES: dict[str, Any] = {
    "founded": {"version": 1, "description": "a model"},
    "generation/0": {
        "version": 1,
        "number": 0,
        "members": [[0, 0], [1, 0]],
        "newcomers": [1],
        "tickets": 0,
    },
    "request/1": {"version": 1, "rank": 3},
    "endpoint/0/1": {"version": 1, "endpoint": "tcp://127.0.0.1:1"},
    "beat/0/0": 1,
}


def read_all(store: HashStore) -> None:
    membership = Membership(store)
    membership.description()
    generation = membership.latest()
    membership.waiting(generation)
    membership.endpoints(generation)
    membership.silent_s(generation)


@given(data=st.data())
def test_entries_of_the_membership_are_read_or_refused(data: st.DataObject) -> None:
    store = HashStore()
    for key, entry in ENTRIES.items():
        store.set(key, json.dumps(entry))
    key = data.draw(st.sampled_from(sorted(ENTRIES)))
    store.set(key, data.draw(altered_text(ENTRIES[key])).decode(errors="replace"))
    succeeds_or_refuses(lambda: read_all(store))


@pytest.mark.parametrize("key", sorted(ENTRIES))
@pytest.mark.parametrize(
    "said", [NESTED, LONG_NUMBER, "[]", "1e400", '{"version": 1, "rank": 1e400}']
)
def test_an_entry_that_is_something_else_is_read_or_refused(key: str, said: str) -> None:
    store = HashStore()
    for name, entry in ENTRIES.items():
        store.set(name, json.dumps(entry))
    store.set(key, said)
    succeeds_or_refuses(lambda: read_all(store))


@given(data=st.data())
def test_the_entry_of_a_network_is_read_or_refused(data: st.DataObject) -> None:
    store = HashStore()
    create_network(store, token="token", rank=0, world_size=2, address="127.0.0.1", secret=SECRET)
    (key,) = [name for name in ("offbeat/network",) if store.check([name])]
    said = data.draw(altered_text(json.loads(store.get(key))))
    store.set(key, said.decode(errors="replace"))
    succeeds_or_refuses(lambda: find_network(store, rank=1, address="127.0.0.1", secret=SECRET))


@pytest.mark.parametrize(
    "entry",
    [
        {"token": "\ud800", "world_size": 2, "proof": "00"},
        {"token": "a", "world_size": 2, "proof": "\ud800"},
        {"token": "a", "world_size": float("inf"), "proof": "00"},
        {"token": [], "world_size": 2, "proof": "00"},
    ],
)
def test_an_entry_of_a_network_with_other_types_is_refused(entry: dict[str, Any]) -> None:
    store = HashStore()
    store.set("offbeat/network", json.dumps({"version": 1, **entry}))
    with pytest.raises(OffbeatError, match="is damaged"):
        find_network(store, rank=1, address="127.0.0.1", secret=SECRET)
