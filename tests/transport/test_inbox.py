from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offbeat.transport.envelope import Envelope, EnvelopeKind, pack, parse
from offbeat.transport.mesh import Inbox


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
    assert inbox.has(1, 0)


def test_a_peer_is_ahead_only_on_the_same_stream() -> None:
    inbox = Inbox()
    stream = 5 << 32
    inbox.put(*_message(0, stream | 9, b""))
    assert inbox.exchange_ahead(1, stream | 8) == 9
    assert inbox.exchange_ahead(1, stream | 9) is None
    assert inbox.exchange_ahead(1, (6 << 32) | 8) is None
    assert inbox.exchange_ahead(2, stream | 8) is None
