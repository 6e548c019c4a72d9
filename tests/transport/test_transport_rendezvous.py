"""Who has come and who will not, seen in the store alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError
from offbeat.transport import rendezvous
from offbeat.transport.rendezvous import Presence, Rendezvous
from transport_support.ports import free_ports

LOOPBACK = "127.0.0.1"
Register = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def register(store: HashStore) -> Iterator[Register]:
    """Registers `position` of `ranks` in `store`, and lets it be present until the test ends."""
    with ExitStack() as stack:

        def registered(
            position: int, ranks: Sequence[int], *, lost: AbstractSet[int] = frozenset()
        ) -> list[dict[str, Any]]:
            presence = stack.enter_context(closing(Presence(LOOPBACK)))
            meeting = Rendezvous(store, position, ranks, lost=lost)
            return meeting.register({"name": f"at {position}"}, presence=presence.address)

        yield registered


def outcomes(*calls: Callable[[], object]) -> list[OffbeatError | None]:
    """What each of `calls` raised, all of them run at the same time."""
    raised: list[OffbeatError | None] = [None] * len(calls)

    def carry_out(number: int) -> None:
        try:
            calls[number]()
        except OffbeatError as error:
            raised[number] = error

    threads = [threading.Thread(target=carry_out, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_all_come_and_hear_of_each_other(store: HashStore, register: Register) -> None:
    heard: dict[int, list[str]] = {}

    def come(position: int) -> None:
        entries = register(position, [4, 7, 9], lost={5})
        heard[position] = [entry["name"] for entry in entries]

    assert outcomes(*(lambda at=at: come(at) for at in range(3))) == [None] * 3
    assert list(heard.values()) == [["at 0", "at 1", "at 2"]] * 3


def test_a_refusal_is_heard_by_all(store: HashStore, register: Register) -> None:
    refusal = ConfigError("no address")
    heard, _ = outcomes(
        lambda: register(0, [0, 1]),
        lambda: Rendezvous(store, 1, [0, 1], lost=set()).refuse(refusal),
    )
    assert isinstance(heard, MismatchError)
    assert str(heard) == "rank 1 refused: no address"


def test_a_lost_rank_is_named_to_those_too_who_did_not_know(
    monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.05)
    ranks = [0, 3, 5]
    raised = outcomes(lambda: register(0, ranks), lambda: register(2, ranks, lost={3}))
    for error in raised:
        assert isinstance(error, PeerError)
        assert error.rank == 3
        assert "rank 3 was lost in an earlier session" in str(error)
        assert "new_group([0, 5]" in str(error)


def test_a_rank_that_was_lost_and_comes_all_the_same_is_there(register: Register) -> None:
    raised = outcomes(lambda: register(0, [0, 1], lost={1}), lambda: register(1, [0, 1], lost={0}))
    assert raised == [None, None]


def test_who_was_held_lost_and_comes_late_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)
    for position, lost in ((0, {1}), (1, set())):
        with pytest.raises(PeerError, match="rank 1 was lost"):
            register(position, [0, 1], lost=lost)


def test_a_rank_that_only_its_own_host_can_find_is_not_said_to_have_ended(
    store: HashStore,
) -> None:
    """As where a host has its own name at 127.0.1.1."""
    addresses = [(LOOPBACK, free_ports(1)[0]), ("192.0.2.7", 29500)]
    meetings = [Rendezvous(store, position, [4, 7, 9], lost=set()) for position in range(2)]
    raised = outcomes(
        *(
            lambda meeting=meeting, address=address: meeting.register({}, presence=address)
            for meeting, address in zip(meetings, addresses, strict=True)
        )
    )
    for error in raised:
        assert isinstance(error, PeerError)
        assert "rank 4 listens at 127.0.0.1, where no other host finds it" in str(error)


def test_who_never_comes_is_named_when_the_time_is_over(
    store: HashStore, register: Register
) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(PeerError, match="rank 1 has not come to attach"):
        register(0, [0, 1])


def come_and_end(store: HashStore, position: int, ranks: Sequence[int]) -> None:
    """Register, as a process that ends while the others have not come yet."""
    with closing(Presence(LOOPBACK)) as presence:
        meeting = Rendezvous(store, position, ranks, lost=set())
        with pytest.raises(PeerError, match="has not come"):
            meeting.register({}, presence=presence.address)


def test_who_came_and_ended_is_named_to_those_who_wait_for_others(
    store: HashStore, register: Register
) -> None:
    store.set_timeout(timedelta(seconds=0.01))
    come_and_end(store, 1, [0, 1, 2])
    store.set_timeout(timedelta(seconds=60))
    with pytest.raises(PeerError, match="rank 1 ended while the ranks connected") as raised:
        register(0, [0, 1, 2])
    assert raised.value.rank == 1
    with pytest.raises(PeerError, match="rank 1 ended while the ranks connected"):
        register(2, [0, 1, 2])


class AskedStore(HashStore):
    """Writes down which entries it is asked for. The entry `late` is written once it was asked for
    alone five times.
    """

    def __init__(self, late: str = "", word: str = "") -> None:
        super().__init__()
        self.asked: list[list[str]] = []
        self._late, self._word = late, word

    def check(self, keys: list[str]) -> bool:
        self.asked.append(keys)
        if self.asked.count([self._late]) == 5:
            self.set(self._late, self._word)
        return super().check(keys)


@pytest.mark.parametrize("phase", ["here", "a phase"])
def test_who_waits_for_one_of_many_asks_for_its_entry_alone(phase: str) -> None:
    size, late = 64, f"{phase}/40"
    with closing(Presence(LOOPBACK)) as presence:
        word = json.dumps({"presence": presence.address, "serves_store": False})
        store = AskedStore(late, word)
        for position in range(1, size):
            if position != 40:
                store.set(f"{phase}/{position}", word)
        meeting = Rendezvous(store, 0, range(size), lost=set())
        if phase == "here":
            meeting.register({}, presence=presence.address)
        else:
            meeting.exchange(phase, word, limit_s=60.0)
    asked = [[key for key in keys if key.startswith(phase)] for keys in store.asked]
    alone = [place for place, keys in enumerate(asked) if keys == [late]]
    assert all(keys in ([], [late]) for keys in asked[alone[0] : alone[4]])
    assert sum(map(len, asked)) < 6 * size


def test_who_comes_first_of_many_asks_for_few_entries() -> None:
    store = AskedStore()
    store.set_timeout(timedelta(seconds=0.05))
    with (
        closing(Presence(LOOPBACK)) as presence,
        pytest.raises(PeerError, match="rank 1 has not come to attach"),
    ):
        Rendezvous(store, 0, range(1000), lost=set()).register({}, presence=presence.address)
    assert sum(map(len, store.asked)) < 100


def test_each_rank_looks_after_a_few_at_a_time_and_after_all_in_the_end() -> None:
    size, dead = 40, 20
    store = HashStore()
    with closing(Presence(LOOPBACK)) as presence:
        for position in range(1, size):
            port = free_ports(1)[0] if position == dead else presence.address[1]
            entry = {"presence": [LOOPBACK, port], "serves_store": False}
            store.set(f"here/{position}", json.dumps(entry))
        meeting = Rendezvous(store, 0, range(size), lost=set())
        meeting.register({}, presence=presence.address)
        assert [list(meeting.ended()) for _ in range(5)] == [[], [], [dead], [dead], [dead]]


def test_what_all_say_is_heard_by_all_and_who_says_nothing_is_named(store: HashStore) -> None:
    meetings = []
    with ExitStack() as stack:
        for position in range(2):
            presence = stack.enter_context(closing(Presence(LOOPBACK)))
            meeting = Rendezvous(store, position, [0, 1], lost=set())
            meetings.append((meeting, presence))
        come = [
            lambda pair=pair: pair[0].register({}, presence=pair[1].address) for pair in meetings
        ]
        assert outcomes(*come) == [None, None]
        heard: list[list[str]] = []
        say = [
            lambda at=at, pair=pair: heard.append(
                pair[0].exchange("first", f"from {at}", limit_s=60.0)
            )
            for at, pair in enumerate(meetings)
        ]
        assert outcomes(*say) == [None, None]
        assert heard == [["from 0", "from 1"]] * 2

        first = meetings[0][0]
        with pytest.raises(PeerError, match="rank 1 has been silent for 0.05 s") as silent:
            first.exchange("second", "", limit_s=0.05)
        assert silent.value.rank == 1
        with pytest.raises(PeerError, match="rank 1 has been silent"):
            meetings[1][0].exchange("second", "", limit_s=60.0)


def test_a_connection_that_broke_is_the_fault_of_who_ended(
    store: HashStore, register: Register
) -> None:
    ranks = [0, 1]
    gone = Presence(LOOPBACK)
    with closing(Presence(LOOPBACK)) as here:
        first, second = (Rendezvous(store, at, ranks, lost=set()) for at in ranks)
        come = [
            lambda: first.register({}, presence=here.address),
            lambda: second.register({}, presence=gone.address),
        ]
        assert outcomes(*come) == [None, None]
        broken = PeerError("connection reset\nat some line")
        assert first.ended() == {}
        gone.close()
        assert list(first.ended()) == [1]
        cause = first.cause_of(broken)
    assert isinstance(cause, PeerError)
    assert cause.rank == 1
    assert str(cause).startswith("rank 1 ended while the ranks connected (connection reset)")


def test_what_broke_while_all_live_has_no_name(store: HashStore, register: Register) -> None:
    cause = Rendezvous(store, 0, [0], lost=set()).cause_of(PeerError("reset"), within_s=0.01)
    assert "could not be connected (reset)" in str(cause)
    with pytest.raises(PeerError, match="could not be connected"):
        register(0, [0])


def test_a_failure_of_one_rank_ends_the_start_for_all(store: HashStore, register: Register) -> None:
    Rendezvous(store, 1, [0, 1], lost=set()).fail(ValueError("a mistake"))
    with pytest.raises(PeerError, match="rank 1 failed .* ValueError: a mistake") as raised:
        register(0, [0, 1])
    assert raised.value.rank == 1


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    serving = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    client = TCPStore(LOOPBACK, serving.port, is_master=False, wait_for_workers=False)
    del serving
    meeting = Rendezvous(client, 0, [0, 1], lost=set())
    with (
        closing(Presence(LOOPBACK)) as presence,
        pytest.raises(PeerError, match="store does not answer"),
    ):
        meeting.register({}, presence=presence.address)


@pytest.mark.parametrize(
    ("serving", "has_ended", "named", "message"),
    [
        (None, False, None, "the run's store does not answer"),
        (2, True, 8, "rank 8, which served the run's store, has ended"),
        (2, False, 8, "rank 8, which served the run's store, does not answer"),
    ],
)
def test_a_store_that_is_lost_is_the_fault_of_who_served_it_and_of_no_survivor(
    serving: int | None, has_ended: bool, named: int | None, message: str
) -> None:
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    clients = [
        TCPStore(LOOPBACK, server.port, is_master=False, wait_for_workers=False) for _ in range(3)
    ]
    meetings = [Rendezvous(client, at, [6, 7, 8], lost=set()) for at, client in enumerate(clients)]
    presences = [Presence(LOOPBACK) for _ in meetings]
    come = [
        lambda at=at: meetings[at].register(
            {}, presence=presences[at].address, serves_store=at == serving
        )
        for at in range(3)
    ]
    assert outcomes(*come) == [None, None, None]
    del server
    presences[1].close()  # the one who learnt of it first has raised
    if has_ended:
        presences[2].close()
    with pytest.raises(PeerError, match=message) as raised:
        meetings[0].exchange("a phase", "", limit_s=60.0)
    assert raised.value.rank == named
    cause = meetings[0].cause_of(PeerError("reset"))
    assert isinstance(cause, PeerError)
    assert cause.rank == named
    for presence in presences:
        presence.close()


def test_the_first_cause_that_is_found_stays_the_cause(store: HashStore) -> None:
    first, second = (Rendezvous(store, position, [0, 1], lost=set()) for position in range(2))
    first.fail(ValueError("a mistake"))
    cause = second.cause_of(PeerError("reset"), within_s=0.0)
    assert isinstance(cause, PeerError)
    assert cause.rank == 0
    second.fail(PeerError("rank 0 ended"))
    with pytest.raises(PeerError, match="rank 0 failed .* ValueError: a mistake"):
        second.exchange("a phase", "", limit_s=60.0)


@pytest.mark.parametrize(
    "entry",
    [
        *("", "{", "[]", "{}", '{"presence": 3}', "\ud800"),
        '{"presence": ["host", 1], "serves_store": false}',
        '{"presence": ["127.0.0.1", 1]}',
    ],
)
def test_an_entry_that_is_no_entry_is_an_error_of_ours(store: HashStore, entry: str) -> None:
    store.set("here/1", entry.encode(errors="surrogatepass"))
    with (
        closing(Presence(LOOPBACK)) as presence,
        pytest.raises(OffbeatError, match="what rank 1 says of itself cannot be read"),
    ):
        Rendezvous(store, 0, [0, 1], lost=set()).register({}, presence=presence.address)


@pytest.mark.parametrize("halted", ["", "{", "[]", '["why"]', '["why", "1"]'])
def test_a_cause_that_is_none_is_an_error_of_ours(store: HashStore, halted: str) -> None:
    store.set("halted", halted)
    with pytest.raises(OffbeatError, match="why no session can begin cannot be read"):
        Rendezvous(store, 0, [0, 1], lost=set()).exchange("a phase", "", limit_s=60.0)


def test_what_is_no_text_is_an_error_of_ours(store: HashStore) -> None:
    store.set("a phase/1", b"\xff")
    with pytest.raises(OffbeatError, match="'a phase' cannot be read"):
        Rendezvous(store, 0, [0, 1], lost=set()).exchange("a phase", "", limit_s=60.0)
