from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from datetime import timedelta

import pytest
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
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.rendezvous import Presence, refused
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
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert listen_address(address) == address


def test_the_loopback_interface_has_the_loopback_address() -> None:
    assert listen_address("lo") == "127.0.0.1"


def test_without_a_hint_only_this_host_is_listened_to() -> None:
    assert listen_address() == "127.0.0.1"


def test_an_argument_beats_offbeats_variable_which_beats_gloos_which_beats_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listen_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "10.0.0.2,lo")
    assert listen_address() == "10.0.0.2"
    monkeypatch.setenv("OFFBEAT_INTERFACE", "10.0.0.3")
    assert listen_address() == "10.0.0.3"
    assert listen_address("10.0.0.4") == "10.0.0.4"


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
        pair[0].start(Send(1, b"hello"), 0)
        assert bytes(pair[1].start(Recv(0, 20.0), 0).wait()) == b"hello"
        presence = Presence("127.0.0.1")
        stack.callback(presence.close)
        assert presence.address[0] == "127.0.0.5"
        assert refused({0: presence.address}) == set()
        assert sum(map(len, connections)) >= 2  # one each way


@pytest.mark.parametrize("text", ["::", "head", "10.0.0", "10.0.0.7:29600"])
def test_an_address_that_peers_cannot_use_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"OFFBEAT_ADDRESS is '{text}'; allowed is the numeric"):
        reachable_address("127.0.0.1")
