"""The outgoing connection to one peer, and whether that peer is still alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import zmq
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import ConfigError
from offbeat.transport.envelope import EnvelopeKind, pack
from offbeat.transport.operations import Payload
from offbeat.transport.protection import Protection

FRAME_BYTES = 1 << 20
"""Payloads travel in frames of this size, since a receiver keeps one frame of each connection in
memory before it knows who sends it; the last frame is shorter."""

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED

# As integers, because operations on pyzmq's flags take long, and each message needs some.
_READABLE = int(zmq.POLLIN)
_AT_ONCE = int(zmq.NOBLOCK)
_MORE_FOLLOWS = int(zmq.NOBLOCK | zmq.SNDMORE)

# what a peer sends back: handshakes and heartbeats
_MAX_ANSWER_BYTES = 1 << 16

# below this size keeping track of a borrowed buffer costs more than copying it
_ZERO_COPY_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLimits:
    """When a peer counts as dead, and how large a message may be.

    Attributes:
        max_message_bytes: largest payload of one message, sent or received.
        heartbeat_interval_s: how often an idle connection is probed. The peer's I/O thread answers,
            busy or not.
        heartbeat_timeout_s: a connection on which nothing is heard for this long is lost. The
            longest that a peer may be stopped (a debugger, SIGSTOP, a suspended virtual machine)
            without being held dead.
        grace_s: a peer whose connection is lost and does not come back for this long is dead. Must
            be longer than a closing peer's last messages may take to arrive.
        connect_timeout_s: how long the first connection to a peer may take.
        handshake_timeout_s: how long whoever connects may take to show its key.
        linger_s: how long closing waits for messages already sent to reach peers that are alive.
    """

    max_message_bytes: int = 1 << 31
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 20.0
    grace_s: float = 1.5
    connect_timeout_s: float = 20.0
    handshake_timeout_s: float = 10.0
    linger_s: float = 5.0

    @classmethod
    def tolerating(cls, silence_s: float) -> PeerLimits:
        """Limits by which a peer that is silent for `silence_s` is dead, and at most 3 s later."""
        return cls(
            heartbeat_interval_s=min(1.0, silence_s / 10),
            heartbeat_timeout_s=silence_s,
            grace_s=min(1.5, silence_s / 4),
            connect_timeout_s=silence_s,
        )

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(
                    f"PeerLimits.{field.name} is {value}, allowed is any finite number above 0"
                )


def num_frames(num_bytes: int) -> int:
    """How many frames a payload of `num_bytes` travels in; an empty one in one."""
    return max(-(-num_bytes // FRAME_BYTES), 1)


def has_message(of: zmq.Socket[bytes]) -> bool:
    """Whether to try to receive without waiting. `of.poll(0)` says the same at many times the cost,
    and connections are looked at all the time.
    """
    events = of.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)


class Link:
    """Sends to one peer, and learns from the socket's monitor whether the peer can be reached.

    Args:
        context: the ZeroMQ context to open the socket in.
        peer: its rank.
        endpoint: where it listens, "tcp://address:port", and what the cipher adds.
        sender: this rank.
        generation: number of the membership.
        protection: shows who this rank is, and seals what it says.
        limits: when the peer counts as dead.
        now_s: the monotonic clock.

    Attributes:
        ever_connected: whether there was a connection at some call of `watch`.

    Raises:
        ConfigError: the endpoint is malformed, or that of another cipher.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        peer: int,
        endpoint: str,
        sender: int,
        generation: int,
        protection: Protection,
        limits: PeerLimits,
        now_s: float,
    ) -> None:
        address, mark, salt = endpoint.partition("#")
        self._sealer = protection.sealer(peer, mark + salt)
        self._with_checksum = protection.with_checksum
        self._sender = sender
        self._generation = generation
        self._limits = limits
        self._next_sequence = 0
        self.ever_connected = False
        self._disconnected_since_s: float | None = now_s
        self._refused = False
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = round(limits.linger_s * 1000)
        self._socket.ipv6 = "[" in address
        self._socket.maxmsgsize = _MAX_ANSWER_BYTES
        self._socket.handshake_ivl = math.ceil(limits.handshake_timeout_s * 1000)
        self._socket.heartbeat_ivl = math.ceil(limits.heartbeat_interval_s * 1000)
        self._socket.heartbeat_timeout = math.ceil(limits.heartbeat_timeout_s * 1000)
        # several attempts must fit into the grace period
        self._socket.reconnect_ivl = max(1, min(100, round(limits.grace_s * 1000 / 8)))
        protection.guard_link(self._socket, peer)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close(now_s, linger=False)
            raise ConfigError(
                f"cannot connect to {endpoint!r}: {error}; give what that rank's Peers.endpoint"
                " says, like 'tcp://10.0.0.7:41234'"
            ) from error

    def send(self, kind: EnvelopeKind, channel: int, payload: Payload) -> None:
        """Queue a message. Never blocks; large payloads are not copied."""
        view = memoryview(payload).cast("B")
        header = pack(
            kind=kind,
            sender=self._sender,
            generation=self._generation,
            channel=channel,
            sequence=self._next_sequence,
            payload=view,
            with_checksum=self._with_checksum,
        )
        frames = [
            view[begin : begin + FRAME_BYTES]
            for begin in range(0, max(view.nbytes, 1), FRAME_BYTES)
        ]
        sealed: Sequence[Payload] = frames
        if self._sealer is not None:
            header, sealed = self._sealer.seal(self._next_sequence, header, frames)
        self._next_sequence += 1
        try:
            self._socket.send(header, _MORE_FOLLOWS)
        except zmq.Again:
            # the queue has no limit: a full one means that ZeroMQ gave the connection up, as it
            # does after a refusal
            self._refused = True
            return
        for frame in sealed[:-1]:
            self._send_frame(frame, _MORE_FOLLOWS)
        self._send_frame(sealed[-1], _AT_ONCE)

    def _send_frame(self, frame: Payload, flags: int) -> None:
        self._socket.send(frame, flags, copy=len(frame) < _ZERO_COPY_BYTES)

    def watch(self, now_s: float) -> None:
        """Read what ZeroMQ reports of the connection. Never blocks."""
        while has_message(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._disconnected_since_s = None
                if self.ever_connected:
                    # Its sequence number shows the peer whether messages were lost with the
                    # connection, even if this rank sends nothing else for long.
                    self.send(EnvelopeKind.HELLO, 0, b"")
                self.ever_connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused = True
            elif self._disconnected_since_s is None:
                self._disconnected_since_s = now_s

    @property
    def is_disconnected(self) -> bool:
        """Whether there was a connection when it was last looked at, and is none any more."""
        return self.ever_connected and self._disconnected_since_s is not None

    def death_reason(self, now_s: float) -> str | None:
        """Why the peer is held dead ("lost its connection ..."); None while it may live."""
        if self._refused:
            return "refused this rank; do all ranks have the same generation and world size?"
        if self._remaining_grace_s(now_s) > 0:
            return None
        if not self.ever_connected:
            return (
                f"could not be reached within {self._limits.connect_timeout_s:g} s; is it running,"
                " can this host route to its address, and do both have the same run secret?"
            )
        return (
            f"is dead: its connection has been gone for {self._limits.grace_s:g} s; it ended, or"
            f" was silent for {self._limits.heartbeat_timeout_s:g} s (stopped, or its host cut off)"
        )

    def close(self, now_s: float, *, linger: bool) -> None:
        """Close the socket. With `linger`, what was sent goes on being delivered for a while, until
        the context ends.
        """
        linger_s = min(self._limits.linger_s, self._remaining_grace_s(now_s)) if linger else 0.0
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=math.ceil(linger_s * 1000))

    def _remaining_grace_s(self, now_s: float) -> float:
        """How much longer the connection may stay lost; infinite while it is there."""
        if self._refused:
            return 0.0
        if self._disconnected_since_s is None:
            return math.inf
        allowed_s = self._limits.grace_s if self.ever_connected else self._limits.connect_timeout_s
        return max(0.0, allowed_s - (now_s - self._disconnected_since_s))
