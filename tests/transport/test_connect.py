"""How the ranks of a session connect, and the network that they have then."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from offbeat.errors import ConfigError, OffbeatError, PeerError, UnsupportedError, WireError
from offbeat.transport import connect as connecting
from offbeat.transport.connect import (
    RETURN_VARIABLE,
    SECRET_VARIABLE,
    connect,
    is_returning,
    reconnect,
)
from offbeat.transport.link import SILENCE_VARIABLE
from offbeat.transport.network import (
    Network,
    StoreLostError,
    answering_within,
    bottom_of,
    create_network,
    find_network,
)
from offbeat.transport.operations import AllReduceTensor, Now, Post, Recv, RecvAny, Send
from offbeat.transport.rendezvous import Presence, Rendezvous
from offbeat.transport.single_rank import SingleRank
from ranks_support.process import launcher_environment
from transport_support.ports import free_ports

# What a session opens its meshes with, and how a worker that comes later finds it.


LOOPBACK = "127.0.0.1"
RUN_SECRET = "a secret of this test run only"


def founder(
    store: Store, *, rank: int = 0, token: str = "first", secret: str = RUN_SECRET
) -> Network:
    return create_network(
        store, token=token, rank=rank, world_size=2, address=LOOPBACK, secret=secret.encode()
    )


@pytest.fixture
def serving() -> TCPStore:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def returning(monkeypatch: pytest.MonkeyPatch, serving: TCPStore) -> pytest.MonkeyPatch:
    """The environment of worker 3, which is to join the run whose store is `serving`."""
    values = {
        "RANK": "3",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(serving.port),
    }
    for name, value in {**values, RETURN_VARIABLE: "1", SECRET_VARIABLE: RUN_SECRET}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def talk(first: Network, second: Network) -> None:
    """Open a generation's mesh between the two and send a message through it."""
    pair = [
        network.open(generation=5, position=position, size=2)
        for position, network in enumerate((first, second))
    ]
    with closing(pair[0]), closing(pair[1]):
        for peers in pair:
            peers.connect([end.endpoint for end in pair])
        pair[0].start(Send(1, b"hello"), 0)
        assert bytes(pair[1].start(Recv(0, 20.0), 0).wait()) == b"hello"


def test_a_process_that_nobody_launched_has_no_network() -> None:
    connection = connect()
    assert connection.network is None
    assert isinstance(connection.driver, SingleRank)


def test_a_launched_world_of_one_has_a_network_that_others_can_come_to(
    returning: pytest.MonkeyPatch, serving: TCPStore
) -> None:
    dist.init_process_group("gloo", store=serving, rank=0, world_size=1)
    try:
        alone = connect()
    finally:
        dist.destroy_process_group()
    assert isinstance(alone.driver, SingleRank)
    assert alone.network is not None
    later = reconnect().network
    assert later is not None
    assert (later.rank, later.world_size) == (3, 1)
    alone.network.store.set("left by the founder", "here")
    assert later.store.get("left by the founder") == b"here"
    talk(alone.network, later)


def test_a_launched_world_of_one_refuses_a_secret_that_others_could_guess(
    monkeypatch: pytest.MonkeyPatch, serving: TCPStore
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "too short")
    dist.init_process_group("gloo", store=serving, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="has 9 bytes, needed are 16 or more"):
            connect()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("value", "returns"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_who_returns_was_told_so(
    monkeypatch: pytest.MonkeyPatch, value: str | None, returns: bool
) -> None:
    monkeypatch.delenv(RETURN_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(RETURN_VARIABLE, value)
    assert is_returning() == returns


def test_a_worker_that_returns_finds_the_session_that_was_founded_last(
    returning: pytest.MonkeyPatch, serving: TCPStore
) -> None:
    session = PrefixStore("any", PrefixStore("prefix", serving))
    earlier, last = founder(session), founder(session, token="second")
    found = reconnect().network
    assert found is not None
    assert found.secret == last.secret != earlier.secret
    found.store.set("key", "of the last")
    assert not earlier.store.check(["key"])
    assert last.store.get("key") == b"of the last"


def test_the_driver_of_a_worker_that_returned_refuses_everything(
    returning: pytest.MonkeyPatch, serving: TCPStore
) -> None:
    founder(serving)
    driver = reconnect().driver
    assert (driver.rank, driver.world_size) == (3, 2)
    for operation in (AllReduceTensor(torch.zeros(1)), Now()):
        with pytest.raises(UnsupportedError, match="joined a run under way and cannot perform"):
            driver.start(operation, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", None, "not RANK and WORLD_SIZE"),
        ("MASTER_ADDR", None, "but not MASTER_ADDR;"),
        (SECRET_VARIABLE, None, "only a run that was started with OFFBEAT_RUN_SECRET"),
        (SECRET_VARIABLE, "another secret altogether", "is not the secret of the run"),
        ("MASTER_PORT", "abc", "MASTER_PORT is 'abc'"),
    ],
)
def test_an_environment_that_leads_nowhere_is_refused(
    returning: pytest.MonkeyPatch, serving: TCPStore, name: str, value: str | None, message: str
) -> None:
    founder(serving)
    if value is None:
        returning.delenv(name)
    else:
        returning.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        reconnect()


@pytest.mark.usefixtures("serving")
def test_without_a_store_and_without_a_run_nobody_joins(returning: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="none has begun with this store"):
        reconnect()
    returning.setenv("MASTER_PORT", str(free_ports(1)[0]))
    with pytest.raises(ConfigError, match="no store answers"):
        reconnect()


@pytest.mark.parametrize(
    ("card", "message"),
    [("nonsense", "is damaged"), ("[]", "is damaged"), ('{"version": 2}', "has version 2")],
)
def test_a_damaged_card_is_one_clear_error(card: str, message: str) -> None:
    store = HashStore()
    founder(store)
    store.set("offbeat/network", card)
    with pytest.raises(WireError, match=message):
        find_network(store, rank=1, address=LOOPBACK, secret=RUN_SECRET.encode())


def test_only_rank_0_leaves_the_card() -> None:
    store = HashStore()
    founder(store, rank=1)
    with pytest.raises(ConfigError, match="none has begun"):
        find_network(store, rank=1, address=LOOPBACK, secret=RUN_SECRET.encode())


def test_a_mesh_of_one_is_a_mesh() -> None:
    with closing(founder(HashStore()).open(generation=3, position=0, size=1)) as alone:
        alone.connect([alone.endpoint])
        alone.start(Post(b"to myself"), 7)
        rank, payload = alone.start(RecvAny(frozenset({0}), 20.0), 7).wait()
        assert (rank, bytes(payload)) == (0, b"to myself")
        assert alone.dead() == {}


def test_a_connection_to_the_store_can_be_renewed_while_it_stands(serving: TCPStore) -> None:
    network = founder(PrefixStore("any", serving))
    network.store.set("key", "value")
    renewed = network.renewed_store()
    assert renewed is not None
    assert renewed.get("key") == b"value"
    assert bottom_of(renewed) is not bottom_of(network.store)
    in_memory = replace(network, store=HashStore())
    assert in_memory.renewed_store() is None
    assert in_memory.own_store() is in_memory.store


def test_a_connection_to_a_store_that_ended_cannot() -> None:
    serving = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    network = founder(TCPStore(LOOPBACK, serving.port, is_master=False, wait_for_workers=False))
    del serving
    assert network.renewed_store() is None


def meet_again(rank: int, world_size: int) -> dict[str, Any]:
    """A session's ranks open the mesh of a later generation; then rank 0 plays the worker that
    comes later.
    """
    connection = connect()
    with closing(connection.driver):
        network = connection.network
        assert network is not None
        peers = network.open(generation=1, position=world_size - 1 - rank, size=world_size)
        with closing(peers):
            network.store.set(f"endpoint/{peers.rank}", peers.endpoint)
            peers.connect(
                [
                    network.store.get(f"endpoint/{position}").decode()
                    for position in range(world_size)
                ]
            )
            for other in set(range(world_size)) - {peers.rank}:
                peers.start(Send(other, bytes([rank])), 0)
            heard = [
                bytes(peers.start(Recv(p, 20.0), 0).wait())[0]
                for p in range(world_size)
                if p != peers.rank
            ]
        os.environ |= launcher_environment(9, world_size)
        later = reconnect().network
        assert later is not None
        shared = later.store.get("endpoint/0") == network.store.get("endpoint/0")
        return {
            "heard": heard,
            "watches_all": peers.watch_all,
            "same_secret": later.secret == network.secret,
            "shared": shared,
        }


@pytest.mark.ranks
def test_the_ranks_of_a_session_can_open_meshes_later_without_meeting_again(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, RUN_SECRET)
    found = run_ranks(meet_again, 2)
    assert found == [
        {"heard": [1 - rank], "watches_all": False, "same_secret": True, "shared": True}
        for rank in range(2)
    ]


class Liar(Rendezvous):
    """Says of itself what it is told to say."""

    lies: ClassVar[dict[str, Any]] = {}

    def register(self, entry: Mapping[str, Any], **where: Any) -> list[dict[str, Any]]:
        return super().register({**entry, **self.lies}, **where)

    def exchange(self, phase: str, mine: str, *, limit_s: float) -> list[str]:
        return super().exchange(phase, self.lies.get(phase, mine), limit_s=limit_s)


LIES: list[dict[str, Any]] = [
    {"silence_s": None},
    {"token": 5},
    {"token": "\ud800"},
    {"gloo": "127.0.0.1:5"},
    {"gloo": ["a host", 5]},
    {"endpoint": "nonsense"},
    {"endpoint": "tcp://127.0.0.1:port"},
]


def hear_lies(rank: int, world_size: int) -> list[str]:
    """What connecting raises when rank 0 lies."""
    os.environ[SILENCE_VARIABLE] = "5"
    heard = []
    for lies in LIES:
        if rank == 0:
            Liar.lies = lies
            connecting.Rendezvous = Liar  # type: ignore[misc]
        try:
            connect().driver.close()
        except OffbeatError as error:
            heard.append(type(error).__name__)
    return heard


@pytest.mark.ranks
def test_what_a_rank_says_of_itself_is_an_error_of_ours_on_all_ranks_if_it_is_nonsense(
    run_ranks: Callable[..., list[Any]],
) -> None:
    for heard in run_ranks(hear_lies, 2):
        assert len(heard) == len(LIES)
        assert heard[:5] == ["WireError"] * 5


# A store whose server is stopped while it is asked.


SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


Served = tuple[subprocess.Popen[str], int]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A process that serves a store, and its port."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert server.stdout is not None
        yield server, int(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    server.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.mark.ranks
def test_a_store_that_is_stopped_ends_every_call_and_is_not_believed_later(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1.5")  # longer than a busy machine keeps the server
    server, port = served
    shared = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    network = create_network(
        PrefixStore("any", shared),
        token="a token",
        rank=0,
        world_size=1,
        address=LOOPBACK,
        secret=b"a secret of this test run only",
    )
    own = network.own_store()
    own.set("key", "value")
    assert own.get("key") == b"value"
    assert own.check(["key"])
    assert own.compare_set("key", "value", "other") == b"other"
    assert own.add("count", 2) == 2
    assert own.multi_get(["key", "count"]) == [b"other", b"2"]
    with stopped(server), pytest.raises(StoreLostError, match="serves it ended"):
        own.check(["key"])
    with pytest.raises(StoreLostError):  # not the answer to the question before
        own.add("count", 1)
    assert network.own_store().add("count", 1) == 3


@pytest.mark.ranks
def test_attach_does_not_wait_for_a_store_that_is_stopped_nor_believes_it_later(
    served: Served,
) -> None:
    server, port = served
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    meeting = Rendezvous(PrefixStore("attach", store), 0, [0, 1], lost=set())
    with (
        closing(Presence(LOOPBACK)) as presence,
        stopped(server),
        pytest.raises(PeerError, match="the run's store does not answer"),
        answering_within(store, 0.3),
    ):
        meeting.register({}, presence=presence.address)
    with pytest.raises(RuntimeError):
        store.add("count", 1)


def test_what_ranks_leave_in_the_store_has_short_names_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list[str]()

    def prefixed(name: str, store: dist.Store) -> dist.PrefixStore:
        names.append(name)
        return dist.PrefixStore(name, store)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("far enough")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(connecting, "PrefixStore", prefixed)
        monkeypatch.setattr(connecting, "Rendezvous", refuse)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(1024)))
        with pytest.raises(ConfigError, match="far enough"):
            connect()
    finally:
        dist.destroy_process_group()
    assert len(names[0]) < 100


def test_many_ranks_have_longer_to_connect_by_gloo_and_few_no_longer() -> None:
    assert connecting.attempt_s(8) < 3.5
    assert connecting.attempt_s(1000) > 20.0


def test_files_for_many_ranks_are_allowed_before_their_first_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("far enough")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, before[1]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(Rendezvous, "register", refuse)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(200)))
        with pytest.raises(ConfigError, match="far enough"):
            connect()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > highest + 200
    finally:
        dist.destroy_process_group()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def secrets_of_sessions(rank: int, world_size: int) -> list[str]:
    """What the connections of two sessions are protected by."""
    used: list[str] = []

    class Noting(connecting.Peers):
        def __init__(self, *args: Any, secret: bytes, **options: Any) -> None:
            used.append(secret.hex())
            super().__init__(*args, secret=secret, **options)

    connecting.Peers = Noting  # type: ignore[misc]
    for _ in range(2):
        connect().driver.close()
    return used


@pytest.mark.ranks
def test_a_session_has_keys_of_its_own(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, RUN_SECRET)
    first, second = run_ranks(secrets_of_sessions, 2)
    assert first == second
    assert len({RUN_SECRET.encode().hex(), *first}) == 3
