"""Somebody between two ranks flips bits, repeats, drops, swaps or cuts what they send: each message
arrives once, in order and as it was, or the receiver learns that the sender has lost messages.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError, PeerError, PeerTimeoutError
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers
from transport_support import Alter, Proxy, unaltered

SECRET = b"a secret of this test run only"
LIMITS = PeerLimits(
    grace_s=0.2,
    heartbeat_interval_s=0.05,
    heartbeat_timeout_s=1.0,
    handshake_timeout_s=1.0,
    linger_s=0.1,
)
MESSAGES = [b"first", b"second" * 100, b"", bytes(2_500_000), b"last"]
FIRST_MESSAGE = 3
"""Number of the first frame after the handshake."""


@contextmanager
def ranks_with_proxy(alter: Alter) -> Iterator[tuple[Peers, Peers, Proxy]]:
    """Rank 0, rank 1, and a proxy for what rank 1 sends to rank 0."""
    with ExitStack() as stack:
        ranks = [
            Peers(rank, 2, address="127.0.0.1", secret=SECRET, limits=LIMITS) for rank in (0, 1)
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
    with ranks_with_proxy(tampering) as (receiver, sender, _):
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
    with ranks_with_proxy(tampering) as (receiver, sender, _):
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
        with socket.create_connection((host, int(port)), timeout=20.0) as stranger:
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
        assert bytes(receiver.start(Recv(1, 20.0), 0).wait()) == said
        assert b"nobody" not in b"".join(proxy.sent[0])
