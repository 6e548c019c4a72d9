"""Messages that have arrived and wait to be asked for: in order per sender, sorted by channel."""

from __future__ import annotations

from collections import defaultdict, deque

from offbeat.transport.envelope import Envelope, EnvelopeKind, verify
from offbeat.transport.operations import Payload

_SEQUENCE_BITS = 32


def split_channel(channel: int) -> tuple[int, int]:
    """The (stream, exchange number within the stream) of `channel`."""
    return channel >> _SEQUENCE_BITS, channel & ((1 << _SEQUENCE_BITS) - 1)


class Inbox:
    """What one rank has received and not yet taken. Knows no sockets."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], deque[tuple[Envelope | None, Payload]]] = {}
        self._next_sequence: defaultdict[int, int] = defaultdict(int)
        self._out_of_order: dict[int, dict[int, tuple[Envelope, Payload]]] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def put(self, envelope: Envelope, payload: Payload) -> list[tuple[Envelope, Payload]]:
        """Take a message in. Returns the control messages (all but DATA) that are due with it, in
        the order of sending.

        A repeated message is ignored. After a reconnection messages of the new connection may be
        read before the last ones of the old; they are held back until their turn.
        """
        sender = envelope.sender
        if envelope.sequence < self._next_sequence[sender]:
            return []  # a repetition
        early = self._out_of_order.setdefault(sender, {})
        early[envelope.sequence] = (envelope, payload)
        control = []
        while (message := early.pop(self._next_sequence[sender], None)) is not None:
            self._next_sequence[sender] += 1
            if message[0].kind == EnvelopeKind.DATA:
                self._queue(message)
            else:
                control.append(message)
        if not early:
            del self._out_of_order[sender]
        return control

    def post(self, rank: int, channel: int, payload: Payload) -> None:
        """Take in what `rank`, whose inbox this is, leaves for itself."""
        self._queues.setdefault((rank, channel), deque()).append((None, payload))

    def has(self, peer: int, channel: int) -> bool:
        return (peer, channel) in self._queues

    def take(self, peer: int, channel: int) -> Payload:
        """The next message of `peer` on `channel`, which must be there. Raises `WireError` when it
        is corrupt.
        """
        queue = self._queues[peer, channel]
        envelope, payload = queue.popleft()
        del self._queues[peer, channel]
        if queue:
            # Behind all other queues: `first_of` goes through them in order, and no sender starves.
            self._queues[peer, channel] = queue
        if envelope is not None:
            verify(envelope, payload)
        return payload

    def first_of(self, peers: frozenset[int], channel: int) -> int | None:
        """Whose message on `channel` should be taken next; None when none of `peers`
        has sent one.
        """
        return next(
            (sender for sender, used in self._queues if used == channel and sender in peers), None
        )

    def senders_with_gaps(self) -> list[int]:
        """Ranks some of whose messages are missing while later ones are here.

        A proof of loss once everything that had arrived was put in.
        """
        return list(self._out_of_order)

    def exchange_ahead(self, peer: int, channel: int) -> int | None:
        """The exchange that `peer` has reached on the stream of `channel`, if it is past that of
        `channel`.
        """
        stream, exchange = split_channel(channel)
        latest = self._latest.get((peer, stream), exchange)
        return latest if latest > exchange else None

    def _queue(self, message: tuple[Envelope, Payload]) -> None:
        sender, channel = message[0].sender, message[0].channel
        self._queues.setdefault((sender, channel), deque()).append(message)
        stream, exchange = split_channel(channel)
        self._latest[sender, stream] = max(exchange, self._latest.get((sender, stream), 0))
