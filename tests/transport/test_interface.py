from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from offbeat.errors import ConfigError
from offbeat.transport.interface import bound_socket, listen_address

VARIABLES = ("OFFBEAT_INTERFACE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")


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
