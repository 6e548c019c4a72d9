"""Strangers, attacks on the port, and damage on the way."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import OffbeatError, PeerError, PeerTimeoutError, WireError
from offbeat.transport.envelope import EnvelopeKind, pack
from offbeat.transport.link import FRAME_BYTES
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers
from offbeat.transport.protection import SPARE_CONNECTIONS, KeyPair, key_pair
from transport_support import Alter, Proxy, unaltered

# Whoever does not belong to the run is kept out, and what they send is never believed, unpickled
# or fatal.


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


def take(peers: Peers, timeout_s: float = 60.0, channel: int = 0) -> bytes:
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


def test_a_frame_over_the_limit_costs_its_sender_the_connection(rank_0: Peers) -> None:
    with raw_socket(rank_0, RANK_1, RANK_0) as (push, monitor):
        push.send_multipart(message(bytes(2 * FRAME_BYTES)))
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        push.send_multipart(message(b"modest"))
        assert take(rank_0) == b"modest"


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


# Somebody who reaches the port of a rank, but has no key, costs it little: no memory, few
# descriptors, none of them for long. Raw sockets, which say as much of ZeroMQ's protocol as it
# takes to be a nuisance.


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
    return socket.create_connection((host, int(port)), timeout=60.0)


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
        assert bytes(victim.start(Recv(1, 60.0), 0).wait()) == b"before"
        before = num_descriptors()
        strangers = [stack.enter_context(knock(victim)) for _ in range(1100)]
        for stranger in strangers[most:]:
            wait_for_end(stranger)
        # The last connections are closed a moment after they were shut down.
        while num_descriptors() > before + len(strangers) + most:
            pass
        # Whoever was connected before goes on.
        partner.start(Send(0, b"after"), 0)
        assert bytes(victim.start(Recv(1, 60.0), 0).wait()) == b"after"


def test_after_idle_connections_have_timed_out_a_rank_gets_in(secret: bytes) -> None:
    limits = PeerLimits(handshake_timeout_s=0.5)
    victim = Peers(0, 2, address="127.0.0.1", secret=secret, limits=limits)
    with ExitStack() as stack:
        stack.callback(victim.close)
        strangers = [stack.enter_context(knock(victim)) for _ in range(100)]
        with partner_of(victim, secret) as partner:
            partner.start(Send(0, b"let in"), 0)
            assert bytes(victim.start(Recv(1, 60.0), 0).wait()) == b"let in"
        for stranger in strangers:
            wait_for_end(stranger)


@pytest.mark.parametrize("num_bytes", [FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 5_000_000])
def test_a_message_of_several_frames_arrives_whole(
    victim: Peers, secret: bytes, num_bytes: int
) -> None:
    payload = os.urandom(num_bytes)
    with partner_of(victim, secret) as partner:
        partner.start(Send(0, payload), 0)
        assert bytes(victim.start(Recv(1, 60.0), 0).wait()) == payload


def num_descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


# Somebody between two ranks flips bits, repeats, drops, swaps or cuts what they send: each
# message arrives once, in order and as it was, or the receiver learns that the sender has lost
# messages.


SECRET = b"a secret of this test run only"
PATIENT = PeerLimits(grace_s=60.0, heartbeat_timeout_s=60.0, handshake_timeout_s=1.0, linger_s=0.1)
BRISK = replace(PATIENT, grace_s=0.2, heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)
MESSAGES = [b"first", b"second" * 100, b"", bytes(2_500_000), b"last"]
FIRST_MESSAGE = 3
"""Number of the first frame after the handshake."""


@contextmanager
def ranks_with_proxy(
    alter: Alter, *, limits: PeerLimits = PATIENT
) -> Iterator[tuple[Peers, Peers, Proxy]]:
    """Rank 0, rank 1 with its `limits`, and a proxy for what rank 1 sends to rank 0."""
    with ExitStack() as stack:
        ranks = [
            Peers(rank, 2, address="127.0.0.1", secret=SECRET, limits=own)
            for rank, own in enumerate((PATIENT, limits))
        ]
        for rank in ranks:
            stack.callback(rank.close)
        proxy = stack.enter_context(Proxy(ranks[0].endpoint, alter))
        ranks[0].connect([rank.endpoint for rank in ranks])
        ranks[1].connect([proxy.endpoint, ranks[1].endpoint])
        yield ranks[0], ranks[1], proxy


def received(receiver: Peers, sender: Peers) -> tuple[list[bytes], OffbeatError | None]:
    """What arrives of all messages, and the error at which it ended."""
    taken: list[bytes] = []
    while len(taken) < len(MESSAGES):
        try:
            taken.append(bytes(receiver.start(Recv(1, 0.02), 0).wait()))
        except PeerTimeoutError:
            sender.dead()  # a rank looks at its connections while it waits itself
        except OffbeatError as error:
            return taken, error
    return taken, None


class Tampering:
    """What is done to one frame of the first connection."""

    def __init__(self, action: str, number: int, place: int, bit: int) -> None:
        self._action, self._number, self._place, self._bit = action, number, place, bit
        self._earlier: list[bytes] = []
        self._held = b""

    def __repr__(self) -> str:
        return f"{self._action} frame {self._number} (byte {self._place}, bit {self._bit})"

    def __call__(self, connection: int, number: int, frame: bytes) -> bytes | None:
        if connection:
            return frame
        self._earlier.append(frame)
        if number != self._number:
            held, self._held = self._held, b""
            return frame + held
        place = self._place % len(frame)
        match self._action:
            case "flip":
                changed = bytearray(frame)
                changed[place] ^= 1 << self._bit
                return bytes(changed)
            case "repeat":
                return frame + self._earlier[place % len(self._earlier)]
            case "drop":
                return b""
            case "swap":
                self._held = frame
                return b""
            case "shorten":
                return frame[:place]
            case "insert":
                return frame[:place] + frame
        return None


@settings(max_examples=20)
@given(
    st.builds(
        Tampering,
        st.sampled_from(["flip", "repeat", "drop", "swap", "shorten", "insert", "cut"]),
        st.integers(0, FIRST_MESSAGE + 8),
        st.sampled_from([0, 1, 2, 8, 9, 10, 12, 17, 40, 100, 5000]) | st.integers(0, 1 << 20),
        st.integers(0, 7),
    )
)
def test_messages_arrive_as_they_were_or_their_loss_is_an_error(
    tampering: Tampering,
) -> None:
    with ranks_with_proxy(tampering, limits=BRISK) as (receiver, sender, _):
        for message in MESSAGES:
            sender.start(Send(0, message), 0)
        taken, error = received(receiver, sender)
        assert taken == MESSAGES[: len(taken)]
        if error is not None:
            assert isinstance(error, PeerError)
            assert error.rank == 1


@pytest.mark.parametrize("number", [FIRST_MESSAGE, FIRST_MESSAGE + 1, FIRST_MESSAGE + 7])
def test_a_flipped_bit_of_a_message_is_found_by_its_seal(number: int) -> None:
    tampering = Tampering("flip", number, 50, 3)
    with ranks_with_proxy(tampering, limits=BRISK) as (receiver, sender, _):
        for message in MESSAGES:
            sender.start(Send(0, message), 0)
        taken, error = received(receiver, sender)
        assert len(taken) < len(MESSAGES)
        assert isinstance(error, PeerError)
        assert "lost messages" in str(error)


def test_a_recorded_connection_is_of_no_use_to_who_plays_it_back() -> None:
    with ranks_with_proxy(unaltered) as (receiver, sender, proxy):
        for message in MESSAGES:
            sender.start(Send(0, message), 0)
        assert received(receiver, sender) == (MESSAGES, None)
        host, port = receiver.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60.0) as stranger:
            try:
                stranger.sendall(b"".join(proxy.sent[0]))
                while stranger.recv(4096):
                    pass
            except ConnectionError:
                pass
        with pytest.raises(PeerTimeoutError):
            receiver.start(Recv(1, 0.0), 0).wait()
        assert not receiver.dead()


def test_what_goes_over_the_wire_does_not_show_what_is_said() -> None:
    said = b"what nobody is to read" * 10
    with ranks_with_proxy(unaltered) as (receiver, sender, proxy):
        sender.start(Send(0, said), 0)
        assert bytes(receiver.start(Recv(1, 60.0), 0).wait()) == said
        assert b"nobody" not in b"".join(proxy.sent[0])
