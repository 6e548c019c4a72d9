"""Whoever does not belong to the run is kept out, and what they send is never believed, unpickled
or fatal.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import PeerError, PeerTimeoutError, WireError
from offbeat.transport.envelope import EnvelopeKind, pack
from offbeat.transport.operations import Recv
from offbeat.transport.peers import PeerLimits, Peers
from offbeat.transport.protection import KeyPair, key_pair

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._path,)  # type: ignore[return-value]


@pytest.fixture
def rank_0(secret: bytes, brisk: PeerLimits) -> Iterator[Peers]:
    """Rank 0 of a world of two; the tests play rank 1, or somebody who pretends to be."""
    peers = Peers(0, 2, address="127.0.0.1", secret=secret, limits=brisk)
    yield peers
    peers.close()


@contextmanager
def raw_socket(
    peers: Peers, own: KeyPair | None, server: KeyPair | None
) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A PUSH socket towards `peers` with these keys, and its monitor."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        push = stack.enter_context(context.socket(zmq.PUSH))
        push.linger = 0
        if own is not None and server is not None:
            push.curve_publickey, push.curve_secretkey, push.curve_serverkey = (
                own.public,
                own.secret,
                server.public,
            )
        monitor = stack.enter_context(push.get_monitor_socket(_REFUSALS))
        stack.callback(push.disable_monitor)
        push.connect(peers.endpoint)
        yield push, monitor


def message(
    payload: bytes, *, sequence: int = 0, sender: int = 1, generation: int = 0, channel: int = 0
) -> list[bytes]:
    header = pack(
        kind=EnvelopeKind.DATA,
        sender=sender,
        generation=generation,
        channel=channel,
        sequence=sequence,
        payload=payload,
        with_checksum=True,
    )
    return [header, payload]


def take(peers: Peers, timeout_s: float = 10.0, channel: int = 0) -> bytes:
    return bytes(peers.start(Recv(1, timeout_s), channel).wait())


STRANGER = KeyPair(*zmq.curve_keypair())
RANK_0 = key_pair(b"a secret of this test run only", generation=0, rank=0)
RANK_1 = key_pair(b"a secret of this test run only", generation=0, rank=1)
EARLIER_RANK_1 = key_pair(b"a secret of this test run only", generation=1, rank=1)


@pytest.mark.parametrize(
    ("own", "server"),
    [(None, None), (STRANGER, RANK_0), (RANK_1, STRANGER), (EARLIER_RANK_1, RANK_0)],
    ids=[
        "without keys",
        "with a key of its own",
        "who takes us for another",
        "of another generation",
    ],
)
def test_a_stranger_is_refused_and_the_others_are_still_served(
    rank_0: Peers, own: KeyPair | None, server: KeyPair | None
) -> None:
    with raw_socket(rank_0, own, server) as (push, monitor):
        # ZeroMQ takes no message any more from one that was refused before.
        with suppress(zmq.Again):
            push.send_multipart(message(b"let me in"), zmq.NOBLOCK)
        assert recv_monitor_message(monitor)["event"]
        with pytest.raises(PeerTimeoutError):
            take(rank_0, timeout_s=0.0)
    with raw_socket(rank_0, RANK_1, RANK_0) as (push, _):
        push.send_multipart(message(b"one of us"))
        assert take(rank_0) == b"one of us"


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, bytes(64)])
def test_noise_on_the_port_is_survived(rank_0: Peers, noise: bytes) -> None:
    host, port = rank_0.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
        with raw_socket(rank_0, RANK_1, RANK_0) as (push, _):
            push.send_multipart(message(b"one of us"))
            assert take(rank_0) == b"one of us"


@pytest.mark.parametrize(
    "frames",
    [
        message(b"", sender=0),
        message(b"", sender=7),
        message(b"", generation=1),
        message(b"")[:1],
        [*message(b""), b"more"],
        [b"", b""],
        [b"x" * 44, b""],
        [b"no header at all"],
    ],
    ids=[
        "our rank",
        "no rank",
        "generation",
        "one frame",
        "three frames",
        "empty",
        "no magic",
        "short",
    ],
)
def test_a_message_that_does_not_belong_is_dropped_and_its_sender_named(
    rank_0: Peers, frames: list[bytes]
) -> None:
    with raw_socket(rank_0, RANK_1, RANK_0) as (push, _):
        push.send_multipart(frames)
        with pytest.raises(PeerError, match="rank 1 sent what is no message of this run"):
            take(rank_0)
    assert rank_0.foreign_messages == 1


def test_a_pickle_stays_bytes(rank_0: Peers, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    bomb = pickle.dumps(Bomb(trace))
    with raw_socket(rank_0, RANK_1, RANK_0) as (push, _):
        push.send_multipart(message(bomb))
        assert take(rank_0) == bomb
        push.send(bomb)
        push.send_multipart([bomb, bomb])
        push.send_multipart(message(b"good", sequence=1))
        with pytest.raises(PeerError, match="rank 1 sent what is no message"):
            list(iter(lambda: take(rank_0), None))
    assert rank_0.foreign_messages >= 1
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists()


def test_a_corrupt_payload_is_an_error_that_names_the_rank_and_later_messages_are_fine(
    rank_0: Peers,
) -> None:
    header, _ = message(b"payload")
    with raw_socket(rank_0, RANK_1, RANK_0) as (push, _):
        push.send_multipart([header, b"Payload"])
        push.send_multipart(message(b"good", sequence=1))
        with pytest.raises(WireError, match=r"rank 1 .*checksum"):
            take(rank_0)
        assert take(rank_0) == b"good"


def test_a_message_over_the_limit_costs_its_sender_the_connection(
    secret: bytes, brisk: PeerLimits
) -> None:
    limits = PeerLimits(max_message_bytes=1000, grace_s=brisk.grace_s)
    peers = Peers(0, 2, address="127.0.0.1", secret=secret, limits=limits)
    with raw_socket(peers, RANK_1, RANK_0) as (push, monitor):
        push.send_multipart(message(bytes(10_000)))
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        push.send_multipart(message(b"modest"))
        assert take(peers) == b"modest"
    peers.close()


@pytest.fixture
def rank_1_of(secret: bytes) -> Iterator[Callable[..., Peers]]:
    """Opens a rank 1 that is not quite like the others."""
    with ExitStack() as stack:

        def open_rank_1(
            *, world_size: int = 2, secret: bytes = secret, connect_timeout_s: float = 60.0
        ) -> Peers:
            limits = PeerLimits(connect_timeout_s=connect_timeout_s, linger_s=0.01)
            peers = Peers(1, world_size, address="127.0.0.1", secret=secret, limits=limits)
            stack.callback(peers.close)
            return peers

        yield open_rank_1


def test_ranks_with_different_secrets_are_told_so(
    rank_0: Peers, rank_1_of: Callable[..., Peers], secret: bytes
) -> None:
    rank_1 = rank_1_of(secret=secret[::-1], connect_timeout_s=0.2)
    rank_1.connect([rank_0.endpoint, rank_1.endpoint])
    with pytest.raises(PeerError, match=r"rank 0 could not be reached .* same run secret"):
        rank_1.start(Recv(0), 0).wait()


def test_a_rank_that_another_one_does_not_count_is_told_so(
    rank_1_of: Callable[..., Peers], secret: bytes
) -> None:
    alone = Peers(0, 1, address="127.0.0.1", secret=secret)
    rank_1 = rank_1_of()
    rank_1.connect([alone.endpoint, rank_1.endpoint])
    with pytest.raises(PeerError, match=r"rank 0 refused this rank; .*world size"):
        rank_1.start(Recv(0), 0).wait()
    alone.close()
