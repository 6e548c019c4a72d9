"""The sockets of the peers driver: a `Link` sends to one peer and knows whether it is alive; the
`Listener` lets in the run's own ranks and nobody else.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import ConfigError, OffbeatError, WireError
from offbeat.transport.envelope import Envelope, EnvelopeKind, pack, parse
from offbeat.transport.interface import on_free_port, reachable_address
from offbeat.transport.operations import Payload
from offbeat.transport.protection import Admission, Protection
from offbeat.transport.sockets import finish_sending, parsed_address, second_handle
from offbeat.transport.threads import new_context

SILENCE_VARIABLE: Final = "OFFBEAT_SILENCE_S"
"""Environment variable with that time in seconds, the same on every rank."""

DEFAULT_S: Final = 20.0

_MAX_SILENCE_S: Final = 1_000_000
"""ZeroMQ counts milliseconds in 32 bits."""


FRAME_BYTES = 1 << 20
"""Payloads travel in frames of this size, since a receiver keeps one frame of each connection in
memory before it knows who sends it; the last frame is shorter."""

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)

# As integers, because operations on pyzmq's flags take long, and each message needs some.
_READABLE = int(zmq.POLLIN)

_AT_ONCE = int(zmq.NOBLOCK)

_MORE_FOLLOWS = int(zmq.NOBLOCK | zmq.SNDMORE)

# what a peer sends back: handshakes and heartbeats
_MAX_ANSWER_BYTES = 1 << 16

# below this size keeping track of a borrowed buffer costs more than copying it
_ZERO_COPY_BYTES = 1 << 19

# a kernel that is asked for more refuses, and ZeroMQ then drops every connection
_MAX_KEEPALIVE_S = 32_767

# what encryption and framing add to a frame; generous, it only bounds memory
_OVERHEAD_BYTES = 1024


def silence_s() -> float:
    """The time that is set, in seconds.

    A rank that merely computes is never silent: threads and the kernel answer for it. One that is
    stopped (SIGSTOP, a debugger, a suspended machine) or cut off is.

    Raises:
        ConfigError: the variable holds no such number of seconds.
    """
    given = os.environ.get(SILENCE_VARIABLE, "")
    if not given:
        return DEFAULT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_SILENCE_S:
        raise ConfigError(
            f"{SILENCE_VARIABLE} is {given!r}, allowed is any number of seconds above 0, up to"
            f" {_MAX_SILENCE_S:,}; leave it unset for {DEFAULT_S:g}"
        )
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLimits:
    """When a peer counts as dead.

    Attributes:
        heartbeat_interval_s: how often an idle connection is probed. The peer's I/O thread answers,
            busy or not.
        heartbeat_timeout_s: a connection on which nothing is heard for this long is lost. The
            longest that a peer may be stopped (a debugger, SIGSTOP, a suspended virtual machine)
            without being held dead.
        grace_s: a peer whose connection is lost and does not come back for this long is dead. Must
            be longer than a closing peer's last messages may take to arrive.
        connect_timeout_s: how long the first connection to a peer may take.
        handshake_timeout_s: how long a peer that connects may take to show its key.
        linger_s: for how long closing waits for a peer that confirms nothing of the last messages.
    """

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
        endpoint: where it listens, "tcp://address:port".
        protection: shows who this rank is.
        limits: when the peer counts as dead.
        now_s: the monotonic clock.

    Attributes:
        ever_connected: whether there was a connection at some call of `watch`.

    Raises:
        ConfigError: the endpoint is malformed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        peer: int,
        endpoint: str,
        protection: Protection,
        limits: PeerLimits,
        now_s: float,
    ) -> None:
        self._protection = protection
        self._limits = limits
        self._next_sequence = 0
        self._goodbye: zmq.MessageTracker | None = None
        self.ever_connected = False
        self._disconnected_since_s: float | None = now_s
        self._refused = False
        self._descriptor: int | None = None
        self._endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = round(limits.linger_s * 1000)
        self._socket.ipv6 = "[" in endpoint
        self._socket.maxmsgsize = _MAX_ANSWER_BYTES
        self._socket.handshake_ivl = math.ceil(limits.handshake_timeout_s * 1000)
        self._socket.heartbeat_ivl = math.ceil(limits.heartbeat_interval_s * 1000)
        self._socket.heartbeat_timeout = math.ceil(limits.heartbeat_timeout_s * 1000)
        # several attempts must fit into the grace period
        self._socket.reconnect_ivl = max(1, min(100, round(limits.grace_s * 1000 / 8)))
        protection.guard_link(self._socket, peer)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            self._socket.connect(endpoint)
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
            sender=self._protection.rank,
            generation=self._protection.generation,
            channel=channel,
            sequence=self._next_sequence,
            payload=view,
            with_checksum=self._protection.with_checksum,
        )
        frames = [
            view[begin : begin + FRAME_BYTES]
            for begin in range(0, max(view.nbytes, 1), FRAME_BYTES)
        ]
        self._next_sequence += 1
        try:
            if kind == EnvelopeKind.GOODBYE:
                # ZeroMQ lets go of it once all that was sent before is the kernel's.
                last = zmq.Frame(header, track=True, copy_threshold=0)
                self._goodbye = self._socket.send(last, _MORE_FOLLOWS, copy=False, track=True)
            else:
                self._socket.send(header, _MORE_FOLLOWS)
        except zmq.Again:
            # the queue has no limit: a full one means that ZeroMQ gave the connection up, as it
            # does after a refusal
            self._refused = True
            return
        for number, frame in enumerate(frames, start=1):
            flags = _MORE_FOLLOWS if number < len(frames) else _AT_ONCE
            self._socket.send(frame, flags, copy=len(frame) < _ZERO_COPY_BYTES)

    def watch(self, now_s: float) -> None:
        """Read what ZeroMQ reports of the connection. Never blocks."""
        while has_message(self._monitor):
            report = recv_monitor_message(self._monitor)
            event = report["event"]
            if event == zmq.EVENT_CONNECTED:
                # Kept after a disconnection: `second_handle` sees whether it is still this one.
                self._descriptor = report["value"]
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
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

    @property
    def is_delivering(self) -> bool:
        """Whether the peer can be reached, and not all that was sent before the goodbye is gone."""
        goodbye = self._goodbye
        return self._disconnected_since_s is None and goodbye is not None and not goodbye.done

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

    def close(self, now_s: float, *, linger: bool) -> Callable[[], None]:
        """Close the socket. With `linger`, what was sent goes on being delivered for a while, until
        the context ends.

        Returns:
            What must be called once the context has ended, so that the last messages arrive.
        """
        linger_s = min(self._limits.linger_s, self._remaining_grace_s(now_s)) if linger else 0.0
        connection = None
        if linger and not self.is_disconnected and self._descriptor is not None:
            connection = second_handle(self._descriptor, parsed_address(self._endpoint))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=math.ceil(linger_s * 1000))
        if connection is None:
            return lambda: None
        return partial(finish_sending, connection, linger_s)

    def _remaining_grace_s(self, now_s: float) -> float:
        """How much longer the connection may stay lost; infinite while it is there."""
        if self._refused:
            return 0.0
        if self._disconnected_since_s is None:
            return math.inf
        allowed_s = self._limits.grace_s if self.ever_connected else self._limits.connect_timeout_s
        return max(0.0, allowed_s - (now_s - self._disconnected_since_s))


class Listener:
    """Receives from every rank of one generation.

    Attributes:
        listens_at: address and port.
        endpoint: where peers reach it, "tcp://address:port".
        unreadable: by the rank whose key they came with, why the first message was dropped that is
            malformed, of another generation, or of another rank.
    """

    def __init__(self, address: str, *, protection: Protection, limits: PeerLimits) -> None:
        """Bind a free port, of those that OFFBEAT_PORTS allows.

        Args:
            address: numeric address of this host, no wildcard.
            protection: says who comes in. Messages of another generation than its own are
                dropped.
            limits: how long a handshake may take, and when a connection counts as lost.

        Raises:
            ConfigError: `address` is no numeric address of this host, or no allowed port is free.
        """
        if address in ("0.0.0.0", "::"):  # noqa: S104 - this is the refusal to bind them
            raise ConfigError(
                f"peers cannot listen on {address}: they need an address to connect to; name the"
                " interface or address by which they reach this host, for instance in"
                " OFFBEAT_INTERFACE"
            )
        self.unreadable: dict[int, str] = {}
        self._protection = protection
        self._context = new_context()
        self._socket = self._context.socket(zmq.PULL)
        self._admission = Admission(self._context, self._socket, protection)
        # ZeroMQ sockets belong to one thread; a socket pair is what other threads can wake it by.
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup_receiver, zmq.POLLIN)
        self._socket.rcvhwm = 0
        self._socket.ipv6 = ":" in address
        # It is the frame that counts, and it is read before anybody knows who sends it.
        self._socket.maxmsgsize = FRAME_BYTES + _OVERHEAD_BYTES
        self._socket.handshake_ivl = math.ceil(limits.handshake_timeout_s * 1000)
        # Connections of hosts that are cut off would stay for ever: nothing is sent to them.
        self._socket.tcp_keepalive = 1
        idle_s = min(math.ceil(limits.heartbeat_timeout_s), _MAX_KEEPALIVE_S)
        self._socket.tcp_keepalive_idle = idle_s
        self._socket.tcp_keepalive_intvl = math.ceil(idle_s / 4)
        self._socket.tcp_keepalive_cnt = 4
        protection.guard_listener(self._socket)
        try:
            self._listen(address)
            reached_at = reachable_address(address)
        except OffbeatError:
            self.close()
            raise
        self.listens_at = parsed_address(self._socket.get_string(zmq.LAST_ENDPOINT))
        self.endpoint = _endpoint(reached_at, self.listens_at[1])

    def _listen(self, address: str) -> None:
        def bind(port: int) -> None:
            try:
                self._socket.bind(_endpoint(address, port or "*"))
            except zmq.ZMQError as error:
                raise OSError(error.errno, str(error)) from error

        try:
            on_free_port(bind, address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address!r}: {error.strerror}; give a numeric address of this"
                " host"
            ) from error

    def wait(self, timeout_s: float) -> None:
        """Block until something arrives, `wake` is called or `timeout_s` has passed."""
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._wakeup_receiver.fileno() in ready:
            self._wakeup_receiver.recv(4096)

    def wake(self) -> None:
        """Let the thread that waits return. Never blocks; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it anyway
            self._wakeup_sender.send(b"!")

    def drain(self) -> list[tuple[Envelope, Payload]]:
        """Every message that has arrived and belongs here. Never blocks."""
        found = []
        while has_message(self._socket):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection ended before the message was whole
                break
            if (message := self._admit(frames)) is not None:
                found.append(message)
        return found

    def close(self) -> None:
        """Stop listening and end the threads."""
        self._wakeup_receiver.close()
        self._wakeup_sender.close()
        self._admission.close_socket()
        self._admission.stop()
        self._context.term()

    def _admit(self, frames: list[zmq.Frame]) -> tuple[Envelope, Payload] | None:
        key_owner = self._protection.rank_of(str(frames[0].get("User-Id")).encode())
        try:
            envelope = parse(frames[0].buffer)
            generation = self._protection.generation
            if (envelope.sender, envelope.generation) != (key_owner, generation):
                raise WireError(
                    f"got a message of rank {envelope.sender} and generation"
                    f" {envelope.generation} with the key of rank {key_owner} and generation"
                    f" {generation}"
                )
            del frames[0]
            if len(frames) != num_frames(envelope.num_bytes):
                raise WireError(
                    f"got {len(frames)} frames for {envelope.num_bytes} bytes; somebody on the"
                    " way may have altered them"
                )
            return envelope, _joined(frames)
        except WireError as error:
            if key_owner is not None:
                self.unreadable.setdefault(key_owner, str(error))
            return None


def _endpoint(address: str, port: int | str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port}"


def _joined(frames: list[zmq.Frame]) -> Payload:
    """The payload that came in these frames; a single one is not copied. Each of several is taken
    from `frames` once it is copied, so that a long message is not in memory twice.
    """
    if len(frames) == 1:
        return frames[0].buffer
    payload = np.empty(sum(map(len, frames)), dtype=np.uint8)
    end = payload.size
    while frames:
        frame = frames.pop()
        begin = end - len(frame)
        payload[begin:end] = np.frombuffer(frame.buffer, dtype=np.uint8)
        end = begin
    return payload.data
