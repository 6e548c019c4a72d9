"""This process's sockets, and where they listen."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from offbeat.errors import ConfigError
from offbeat.transport.interface import (
    ADDRESS_VARIABLE,
    PORTS_VARIABLE,
    allowed_ports,
    bound_socket,
    listen_address,
    reachable_address,
)
from offbeat.transport.network import store_sockets
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.rendezvous import Presence, refused
from offbeat.transport.routed import C10d
from offbeat.transport.sockets import (
    SocketAddresses,
    closed_in_children,
    finish_sending,
    listening_at,
    of_service,
    second_handle,
    shut_down,
)
from transport_support.ports import free_ports, relay

VARIABLES = (
    "OFFBEAT_INTERFACE",
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    PORTS_VARIABLE,
    ADDRESS_VARIABLE,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "0.0.0.0"])  # noqa: S104 - asked for by name
def test_an_address_is_taken_as_it_is(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_INTERFACE", address)
    assert listen_address() == address


def test_the_loopback_interface_has_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_INTERFACE", "lo")
    assert listen_address() == "127.0.0.1"


def test_without_a_hint_only_this_host_is_listened_to() -> None:
    assert listen_address() == "127.0.0.1"


def test_offbeats_variable_beats_gloos_which_beats_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listen_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "10.0.0.2,lo")
    assert listen_address() == "10.0.0.2"
    monkeypatch.setenv("OFFBEAT_INTERFACE", "10.0.0.3")
    assert listen_address() == "10.0.0.3"


def test_an_unknown_interface_is_an_error_that_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_INTERFACE", "lol")
    with pytest.raises(ConfigError, match=r"OFFBEAT_INTERFACE is 'lol'.* lo.*did you mean 'lo'"):
        listen_address()


def test_a_master_that_does_not_resolve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    with pytest.raises(ConfigError, match="MASTER_ADDR is 'no such host'"):
        listen_address()


def test_a_bound_socket_listens_there_and_nowhere_else() -> None:
    with bound_socket("127.0.0.1") as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        bound_socket("127.0.0.1") as listening,
        pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1 port"),
    ):
        bound_socket("127.0.0.1", listening.getsockname()[1])


def test_a_store_serves_on_a_bound_socket() -> None:
    listening = bound_socket("127.0.0.1")
    port = listening.getsockname()[1]
    limit = timedelta(seconds=10)
    server = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        master_listen_fd=listening.detach(),
        wait_for_workers=False,
        timeout=limit,
    )
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    client.set("question", "answer")
    assert server.get("question") == b"answer"


def allow(monkeypatch: pytest.MonkeyPatch, ports: range) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, f"{ports[0]}-{ports[-1]}")


@pytest.mark.parametrize(
    "text",
    ["29600", "29600-", "-29600", "29619-29600", "0-5", "a-b", "29600-70000", "1-2-3", "²-³"],
)
def test_a_malformed_range_of_ports_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"OFFBEAT_PORTS is '{text}'; allowed are two ports"):
        bound_socket("127.0.0.1")


def test_sockets_take_the_allowed_ports_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(3)
    allow(monkeypatch, ports)
    assert allowed_ports() == ports
    with ExitStack() as stack:
        taken = {
            stack.enter_context(bound_socket("127.0.0.1")).getsockname()[1]
            for _ in range(len(ports))
        }
        assert taken == {*ports}
        with pytest.raises(
            ConfigError, match=rf"all ports of OFFBEAT_PORTS, {ports[0]}-{ports[-1]}, are in use on"
        ):
            bound_socket("127.0.0.1")
        with pytest.raises(ConfigError, match="are in use on"):
            Peers(0, 2, address="127.0.0.1", secret=b"a secret of this test run only")


def test_a_port_is_free_again_when_its_socket_was_closed_with_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after the death of a worker, in whose place another one comes."""
    (port,) = free_ports(1)
    monkeypatch.setenv(PORTS_VARIABLE, f"{port}-{port}")
    with bound_socket("127.0.0.1") as listening:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listening.accept()
        accepted.close()  # first, so that the server's end is what the kernel remembers
        client.close()
    with bound_socket("127.0.0.1") as again:
        assert again.getsockname()[1] == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_ranks_meet_on_allowed_ports_behind_addresses_that_are_not_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = free_ports(4)
    allow(monkeypatch, ports)
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.5")
    secret = os.urandom(32)
    with ExitStack() as stack:
        connections = [stack.enter_context(relay("127.0.0.5", port)) for port in ports]
        pair = [Peers(rank, 2, address="127.0.0.1", secret=secret) for rank in range(2)]
        for peers in pair:
            stack.callback(peers.close)
        for peers in pair:
            peers.connect([end.endpoint for end in pair])
        for sender, receiver in ((0, 1), (1, 0)):
            pair[sender].start(Send(receiver, b"hello"), 0)
            assert bytes(pair[receiver].start(Recv(sender, 60.0), 0).wait()) == b"hello"
        # A message came through its relay, so that the relay has noted the connection by now.
        assert sum(map(len, connections)) >= 2  # one each way
        presence = Presence("127.0.0.1")
        stack.callback(presence.close)
        assert presence.address[0] == "127.0.0.5"
        assert refused({0: presence.address}) == set()


@pytest.mark.parametrize("text", ["::", "head", "10.0.0", "10.0.0.7:29600"])
def test_an_address_that_peers_cannot_use_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"OFFBEAT_ADDRESS is '{text}'; allowed is the numeric"):
        reachable_address("127.0.0.1")


# Sockets that are found by their addresses, ended, and closed in forked children.


LOOPBACK = "127.0.0.1"

Pair = tuple[socket.socket, socket.socket, socket.socket]
"""What listens, and both ends of a connection to it."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server = stack.enter_context(listener.accept()[0])
        yield listener, client, server


FORK = multiprocessing.get_context("fork")


def tell_count(which: SocketAddresses, telling: Connection) -> None:
    ports = {address[1] for address in which.local | which.remote}
    found = [of_service(port) for port in ports]
    telling.send(sum(len(one.local) + len(one.remote) for one in found))


def count_in_child(which: SocketAddresses) -> int:
    """How many of these sockets a forked child has."""
    hearing, telling = FORK.Pipe(duplex=False)
    with hearing, telling:
        child = FORK.Process(target=tell_count, args=(which, telling))
        child.start()
        count = int(hearing.recv())
        child.join()
        child.close()
    return count


def test_a_listening_socket_is_found_by_its_host(pair: Pair) -> None:
    assert pair[0].getsockname() in listening_at(LOOPBACK)
    assert pair[1].getsockname() not in listening_at(LOOPBACK)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_who_waits_on_a_connection_that_is_shut_down_is_woken(
    pair: Pair, in_thread: Callable[..., threading.Thread], side: str
) -> None:
    listener, client, server = pair
    here, there = (server, client) if side == "local" else (client, server)
    received = []
    waiter = in_thread(lambda: received.append(here.recv(1)))
    address = frozenset([listener.getsockname()])
    shut_down(
        SocketAddresses(local=address) if side == "local" else SocketAddresses(remote=address)
    )
    waiter.join(60)
    assert received == [b""]
    assert there.recv(1) == b""
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()  # it still listens


def test_a_child_has_none_of_the_sockets_and_the_parent_keeps_them(pair: Pair) -> None:
    listener, client, server = pair
    which = of_service(listener.getsockname()[1])
    assert count_in_child(which) > 0
    forget = closed_in_children(which)
    try:
        assert count_in_child(which) == 0
    finally:
        forget()
    client.send(b"!")
    assert server.recv(1) == b"!"
    assert count_in_child(which) > 0


def test_a_mesh_goes_on_after_a_fork_and_the_child_has_no_part_in_it(
    open_mesh: Callable[..., list[Peers]],
) -> None:
    first, second = open_mesh(2)
    for peers in (first, second):
        peers.await_connections(60.0)
    hosts_and_ports = [
        peers.endpoint.removeprefix("tcp://").split(":") for peers in (first, second)
    ]
    addresses = frozenset((host, int(port)) for host, port in hosts_and_ports)
    assert count_in_child(SocketAddresses(local=addresses)) == 0
    first.start(Send(1, b"after"), 0)
    assert bytes(second.start(Recv(0, 60.0), 0).wait()) == b"after"
    assert first.dead() == second.dead() == {}


def test_a_child_has_no_connection_to_the_store() -> None:
    serving = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("any", serving)
    forget = closed_in_children(store_sockets(store))
    try:
        assert count_in_child(of_service(serving.port)) == 0
    finally:
        forget()
    store.set("after", "here")
    assert store.get("after") == b"here"


def test_nobody_listens_any_more_where_a_process_was_present() -> None:
    with closing(Presence(LOOPBACK)) as there:
        gone = Presence(LOOPBACK)
        addresses = {"there": there.address, "gone": gone.address}
        assert refused(addresses) == set()
        gone.close()
        assert refused(addresses) == {"gone"}


def live_until_told(ends: Connection) -> None:
    ends.send("alive")
    ends.recv()


def test_a_child_does_not_stand_in_for_its_parent() -> None:
    presence = Presence(LOOPBACK)
    here, there = FORK.Pipe()
    with here, there:
        child = FORK.Process(target=live_until_told, args=(there,))
        child.start()
        assert here.recv() == "alive"
        presence.close()
        assert refused({0: presence.address}) == {0}
        here.send("end")
        child.join()
        child.close()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one on loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
        server.accept()[0] as other,
    ):
        yield end, other


def test_all_that_was_sent_arrives_when_the_peer_answers_after_the_owner_has_closed(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    owner, peer = connection
    handle = second_handle(owner.fileno(), peer.getsockname())
    assert handle is not None
    owner.setblocking(False)
    num_sent = 0
    with suppress(BlockingIOError):
        while True:
            num_sent += owner.send(bytes(1 << 16))
    owner.close()
    peer.sendall(b"an answer to a heartbeat")
    num_received = 0
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(finish_sending, handle, 60.0)
        while part := peer.recv(1 << 16):
            num_received += len(part)
        finishing.result()
    assert num_received == num_sent
    assert handle.fileno() == -1


def test_finishing_waits_neither_for_a_peer_that_only_does_not_read_nor_past_its_deadline(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    owner, peer = connection
    owner.sendall(b"all of it is with the peer's kernel")
    handle = second_handle(owner.fileno(), peer.getsockname())
    assert handle is not None
    finish_sending(handle, math.inf)
    stuck = second_handle(owner.fileno(), peer.getsockname())
    assert stuck is not None
    finish_sending(stuck, 0.0)
    assert handle.fileno() == stuck.fileno() == -1


def test_there_is_no_second_handle_of_what_is_another_connection_or_none(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    owner, peer = connection
    assert second_handle(owner.fileno(), ("127.0.0.1", 1)) is None
    with open(os.devnull) as file:
        assert second_handle(file.fileno(), peer.getsockname()) is None
    assert second_handle(1 << 20, peer.getsockname()) is None


class Alone:
    """A backend of gloo with nobody in it."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_dense_connections_are_kept_while_nothing_is_sent(pair: Pair) -> None:
    listener, client, server = pair
    driver = C10d(Alone(), sockets=SocketAddresses(remote=frozenset([listener.getsockname()])))
    try:
        kept = [end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in (client, server)]
        assert [bool(each) for each in kept] == [True, False]
    finally:
        driver.close()
