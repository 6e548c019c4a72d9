"""Headers of messages, and what has arrived and was not taken."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import WireError
from offbeat.transport.envelope import HEADER_BYTES, Envelope, EnvelopeKind, pack, parse, verify
from offbeat.transport.mesh import Inbox

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
HEADER = pack(
    kind=EnvelopeKind.DATA,
    sender=1,
    generation=2,
    channel=3,
    sequence=4,
    payload=b"payload",
    with_checksum=True,
)


@given(st.sampled_from(EnvelopeKind), U32, U32, U64, U64, st.binary(max_size=200), st.booleans())
def test_what_is_packed_is_parsed(
    kind: EnvelopeKind,
    sender: int,
    generation: int,
    channel: int,
    sequence: int,
    payload: bytes,
    with_checksum: bool,
) -> None:
    header = pack(
        kind=kind,
        sender=sender,
        generation=generation,
        channel=channel,
        sequence=sequence,
        payload=payload,
        with_checksum=with_checksum,
    )
    envelope = parse(header)
    verify(envelope, payload)
    assert len(header) == HEADER_BYTES
    assert (envelope.checksum is not None) == with_checksum
    assert (envelope.kind, envelope.sender, envelope.generation) == (kind, sender, generation)
    assert (envelope.channel, envelope.sequence, envelope.num_bytes) == (
        channel,
        sequence,
        len(payload),
    )


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused_with_one_kind_of_error(noise: bytes) -> None:
    with pytest.raises(WireError):
        parse(noise)


@given(st.integers(0, 8 * 8 - 1))
def test_no_bit_of_magic_version_kind_and_padding_may_change_unnoticed(bit: int) -> None:
    altered = bytearray(HEADER)
    altered[bit // 8] ^= 1 << bit % 8
    with suppress(WireError):
        assert parse(altered).kind != EnvelopeKind.DATA


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_flipped_bit_of_the_payload_names_the_sender(payload: bytes, data: st.DataObject) -> None:
    envelope = parse(
        pack(
            kind=EnvelopeKind.DATA,
            sender=7,
            generation=0,
            channel=0,
            sequence=0,
            payload=payload,
            with_checksum=True,
        )
    )
    altered = bytearray(payload)
    altered[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match=r"rank 7.*checksum"):
        verify(envelope, altered)


def test_a_truncated_payload_names_the_sender() -> None:
    with pytest.raises(WireError, match="rank 1 announced 7 bytes and holds 6"):
        verify(parse(HEADER), b"payloa")


@pytest.mark.parametrize(
    ("position", "value", "complaint"),
    [(0, 0, "starts with"), (4, 99, "wire version 99"), (5, 200, "kind 200"), (6, 2, "flags 2")],
)
def test_a_foreign_header_is_refused_with_the_reason(
    position: int, value: int, complaint: str
) -> None:
    altered = bytearray(HEADER)
    altered[position] = value
    with pytest.raises(WireError, match=complaint):
        parse(altered)


def test_an_envelope_cannot_be_changed() -> None:
    envelope = parse(HEADER)
    assert isinstance(envelope, Envelope)
    with pytest.raises(AttributeError):
        envelope.sender = 2  # type: ignore[misc]


def _message(
    sequence: int,
    channel: int,
    payload: bytes,
    kind: EnvelopeKind = EnvelopeKind.DATA,
    sender: int = 1,
) -> tuple[Envelope, bytes]:
    header = pack(
        kind=kind,
        sender=sender,
        generation=0,
        channel=channel,
        sequence=sequence,
        payload=payload,
        with_checksum=True,
    )
    return parse(header), payload


def _drain(inbox: Inbox, peer: int, channel: int) -> list[bytes]:
    taken = []
    while (message := inbox.take(frozenset([peer]), channel)) is not None:
        taken.append(bytes(message[1]))
    return taken


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30).flatmap(
        lambda sent: st.tuples(st.just(sent), st.permutations(range(len(sent))))
    )
)
def test_each_channel_keeps_the_order_of_sending_whatever_the_order_of_arrival(
    example: tuple[list[tuple[int, int]], list[int]],
) -> None:
    sent, order = example
    inbox = Inbox()
    next_sequence = [0, 0, 0]
    messages = []
    for number, (channel, sender) in enumerate(sent):
        messages.append(_message(next_sequence[sender], channel, bytes([number]), sender=sender))
        next_sequence[sender] += 1
    for position in order:
        inbox.put(*messages[position])
    assert inbox.senders_with_gaps() == []
    for channel in range(4):
        for sender in range(3):
            expected = [bytes([n]) for n, pair in enumerate(sent) if pair == (channel, sender)]
            assert _drain(inbox, sender, channel) == expected


@given(st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_a_missing_message_shows_as_a_gap_and_nothing_after_it_is_delivered(
    example: tuple[int, int],
) -> None:
    last, missing = example
    inbox = Inbox()
    for sequence in range(last + 1):
        if sequence != missing:
            inbox.put(*_message(sequence, 0, bytes([sequence])))
    assert inbox.senders_with_gaps() == [1]
    assert _drain(inbox, 1, 0) == [bytes([sequence]) for sequence in range(missing)]


def test_a_repeated_message_is_ignored() -> None:
    inbox = Inbox()
    for _ in range(2):
        inbox.put(*_message(0, 0, b"once"))
    assert _drain(inbox, 1, 0) == [b"once"]
    assert inbox.senders_with_gaps() == []


def test_control_messages_wait_for_the_data_sent_before_them() -> None:
    inbox = Inbox()
    goodbye = _message(1, 0, b"", EnvelopeKind.GOODBYE)
    assert inbox.put(*goodbye) == []
    assert inbox.put(*_message(0, 0, b"data")) == [goodbye]
    assert inbox.first_of(frozenset({1}), 0) == 1


class Channel(int):
    """One that counts how often any of its kind is compared with another."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Channel.comparisons += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


class Ranks(frozenset[int]):
    """Some that count how often any of their kind is asked for a rank."""

    questions: ClassVar[int] = 0

    def __contains__(self, rank: object) -> bool:
        Ranks.questions += 1
        return super().__contains__(rank)


def test_a_message_is_found_without_a_look_at_all_others() -> None:
    inbox, num_senders, num_channels = Inbox(), 50, 20
    for sender in range(num_senders):
        for channel in range(num_channels):
            inbox.put(*_message(channel, channel, b"%d" % sender, sender=sender))
    peer, channel = num_senders - 1, Channel(num_channels - 1)
    assert inbox.first_of(Ranks({peer}), channel) == peer
    message = inbox.take(Ranks({peer}), channel)
    assert message is not None
    assert (message[0], bytes(message[1])) == (peer, b"49")
    assert inbox.first_of(Ranks(range(num_senders)), channel) == 0
    assert Channel.comparisons <= 10
    assert Ranks.questions <= 10


def test_a_peer_is_ahead_only_on_the_same_stream() -> None:
    inbox = Inbox()
    stream = 5 << 32
    inbox.put(*_message(0, stream | 9, b""))
    assert inbox.exchange_ahead(1, stream | 8) == 9
    assert inbox.exchange_ahead(1, stream | 9) is None
    assert inbox.exchange_ahead(1, (6 << 32) | 8) is None
    assert inbox.exchange_ahead(2, stream | 8) is None
