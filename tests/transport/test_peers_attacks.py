"""Somebody who reaches the port of a rank, but has no key, costs it little: no memory, few
descriptors, none of them for long. Raw sockets, which say as much of ZeroMQ's protocol as it takes
to be a nuisance.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from offbeat.transport.link import FRAME_BYTES
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers
from offbeat.transport.protection import SPARE_CONNECTIONS

GREETING_BYTES = 64
COMMAND_WITH_LONG_SIZE = 0x06
MESSAGE_WITH_LONG_SIZE = 0x02


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """The first bytes of a client that speaks ZMTP 3.1."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return (signature + bytes([3, 1]) + mechanism.ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")


@pytest.fixture
def victim(secret: bytes) -> Iterator[Peers]:
    """Rank 0 of a world of two, which gives nobody long to show a key."""
    limits = PeerLimits(handshake_timeout_s=0.2)
    peers = Peers(0, 2, address="127.0.0.1", secret=secret, limits=limits)
    yield peers
    peers.close()


def knock(peers: Peers) -> socket.socket:
    """A connection to the port, and nothing said yet."""
    host, port = peers.endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def wait_for_end(connection: socket.socket) -> None:
    """Read until the other side ends the connection; `TimeoutError` if it does not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass


@contextmanager
def partner_of(peers: Peers, secret: bytes) -> Iterator[Peers]:
    """Rank 1, connected both ways."""
    partner = Peers(1, 2, address="127.0.0.1", secret=secret)
    try:
        endpoints = [peers.endpoint, partner.endpoint]
        partner.connect(endpoints)
        peers.connect(endpoints)
        yield partner
    finally:
        partner.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff",
        greeting()[:40],
        greeting(),
        greeting() + b"\x04\xc8\x05HELLO",
        greeting() + struct.pack(">BQ", COMMAND_WITH_LONG_SIZE, 1000),
    ],
    ids=[
        "nothing",
        "a byte",
        "half a greeting",
        "a greeting",
        "the begin of a handshake",
        "the size of a frame",
    ],
)
def test_who_shows_no_key_in_time_is_cut_off(victim: Peers, said: bytes) -> None:
    with knock(victim) as stranger:
        stranger.sendall(said)
        wait_for_end(stranger)


@pytest.mark.parametrize("kind", [COMMAND_WITH_LONG_SIZE, MESSAGE_WITH_LONG_SIZE])
@pytest.mark.parametrize("num_bytes", [FRAME_BYTES + 4096, 1 << 30, (1 << 63) - 1])
def test_a_stranger_cannot_announce_a_large_frame(victim: Peers, kind: int, num_bytes: int) -> None:
    with knock(victim) as stranger:
        stranger.sendall(greeting() + struct.pack(">BQ", kind, num_bytes))
        # Sockets buffer no more than a few MiB that nobody reads.
        with pytest.raises(ConnectionError):
            stranger.sendall(bytes(64 << 20))


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20])
def test_nobody_talks_without_encryption(victim: Peers, mechanism: bytes) -> None:
    with knock(victim) as stranger:
        stranger.sendall(greeting(mechanism))
        wait_for_end(stranger)


def test_descriptors_stay_few_under_many_idle_connections(secret: bytes) -> None:
    victim = Peers(0, 2, address="127.0.0.1", secret=secret)
    most = 2 * victim.world_size + SPARE_CONNECTIONS
    with ExitStack() as stack, partner_of(victim, secret) as partner:
        stack.callback(victim.close)
        partner.start(Send(0, b"before"), 0)
        assert bytes(victim.start(Recv(1, 20.0), 0).wait()) == b"before"
        before = num_descriptors()
        strangers = [stack.enter_context(knock(victim)) for _ in range(1100)]
        for stranger in strangers[most:]:
            wait_for_end(stranger)
        # The last connections are closed a moment after they were shut down.
        while num_descriptors() > before + len(strangers) + most:
            pass
        # Whoever was connected before goes on.
        partner.start(Send(0, b"after"), 0)
        assert bytes(victim.start(Recv(1, 20.0), 0).wait()) == b"after"


def test_after_idle_connections_have_timed_out_a_rank_gets_in(secret: bytes) -> None:
    limits = PeerLimits(handshake_timeout_s=0.5)
    victim = Peers(0, 2, address="127.0.0.1", secret=secret, limits=limits)
    with ExitStack() as stack:
        stack.callback(victim.close)
        strangers = [stack.enter_context(knock(victim)) for _ in range(100)]
        with partner_of(victim, secret) as partner:
            partner.start(Send(0, b"let in"), 0)
            assert bytes(victim.start(Recv(1, 20.0), 0).wait()) == b"let in"
        for stranger in strangers:
            wait_for_end(stranger)


@pytest.mark.parametrize("num_bytes", [FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 5_000_000])
def test_a_message_of_several_frames_arrives_whole(
    victim: Peers, secret: bytes, num_bytes: int
) -> None:
    payload = os.urandom(num_bytes)
    with partner_of(victim, secret) as partner:
        partner.start(Send(0, payload), 0)
        assert bytes(victim.start(Recv(1, 20.0), 0).wait()) == payload


def num_descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/dev/fd").iterdir()))
