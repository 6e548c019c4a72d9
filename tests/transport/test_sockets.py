"""Sockets that are found by their addresses, ended, and closed in forked children."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from offbeat.transport.network import store_sockets
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.rendezvous import Presence, refused
from offbeat.transport.sockets import (
    SocketAddresses,
    closed_in_children,
    listening_at,
    of_service,
    shut_down,
)

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
        peers.await_connections(10.0)
    hosts_and_ports = [
        peers.endpoint.removeprefix("tcp://").split(":") for peers in (first, second)
    ]
    addresses = frozenset((host, int(port)) for host, port in hosts_and_ports)
    assert count_in_child(SocketAddresses(local=addresses)) == 0
    first.start(Send(1, b"after"), 0)
    assert bytes(second.start(Recv(0, 10.0), 0).wait()) == b"after"
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
