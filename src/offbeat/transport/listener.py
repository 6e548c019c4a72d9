"""The listening side of the peers driver: one encrypted socket that lets in the run's own ranks and
nobody else.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import zmq

from offbeat.errors import ConfigError, OffbeatError, WireError
from offbeat.transport.admission import Admission
from offbeat.transport.envelope import HEADER_BYTES, Envelope, parse
from offbeat.transport.interface import on_free_port, reachable_address
from offbeat.transport.link import FRAME_BYTES, PeerLimits, has_message, num_frames
from offbeat.transport.operations import Payload
from offbeat.transport.protection import Protection
from offbeat.transport.sockets import parsed_address
from offbeat.transport.threads import new_context

# what encryption and framing add to a frame; generous, it only bounds memory
_OVERHEAD_BYTES = 1024


class Listener:
    """Receives from every rank of one generation.

    Attributes:
        listens_at: address and port.
        endpoint: where peers reach it, "tcp://address:port".
        num_foreign: messages dropped because they are malformed, of another generation, or not of
            the rank whose key they came with.
        unreadable: by the rank whose key they came with, why the first of these was dropped.
    """

    def __init__(
        self, address: str, *, generation: int, protection: Protection, limits: PeerLimits
    ) -> None:
        """Bind a free port, of those that OFFBEAT_PORTS allows.

        Args:
            address: numeric address of this host, no wildcard.
            generation: number of the membership; messages of another one are dropped.
            protection: says who comes in, and opens what they say.
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
        self.num_foreign = 0
        self.unreadable: dict[int, str] = {}
        self._generation = generation
        self._protection = protection
        self._openers = [protection.opener(rank) for rank in range(protection.world_size)]
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
        self._socket.maxmsgsize = min(FRAME_BYTES, limits.max_message_bytes) + _OVERHEAD_BYTES
        self._socket.handshake_ivl = math.ceil(limits.handshake_timeout_s * 1000)
        # Connections of hosts that are cut off would stay for ever: nothing is sent to them.
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle = math.ceil(limits.heartbeat_timeout_s)
        self._socket.tcp_keepalive_intvl = math.ceil(limits.heartbeat_timeout_s / 4)
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

    def drain(self) -> Iterator[tuple[Envelope, Payload]]:
        """Every message that has arrived and belongs here. Never blocks."""
        while has_message(self._socket):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection ended before the message was whole
                return
            if (message := self._admit(frames)) is not None:
                yield message

    def close(self) -> None:
        """Stop listening and end the threads."""
        self._wakeup_receiver.close()
        self._wakeup_sender.close()
        self._admission.close_socket()
        self._admission.stop()
        self._context.term()

    def _admit(self, frames: Sequence[zmq.Frame]) -> tuple[Envelope, Payload] | None:
        key_owner = self._protection.rank_of(str(frames[0].get("User-Id")).encode())
        try:
            head = frames[0].buffer
            header = head if not self._protection.seal_bytes else head[:HEADER_BYTES]
            envelope = parse(header)
            if (envelope.sender, envelope.generation) != (key_owner, self._generation):
                raise WireError(
                    f"got a message of rank {envelope.sender} and generation"
                    f" {envelope.generation} with the key of rank {key_owner} and generation"
                    f" {self._generation}"
                )
            if len(frames) != 1 + num_frames(envelope.num_bytes):
                raise WireError(
                    f"got {len(frames) - 1} frames for {envelope.num_bytes} bytes; somebody on the"
                    " way may have altered them"
                )
            opener = None if key_owner is None else self._openers[key_owner]
            if opener is None:
                return envelope, _joined(frames[1:])
            sealed = [frame.buffer for frame in frames[1:]]
            return envelope, opener.open(envelope.sequence, header, head[HEADER_BYTES:], sealed)
        except WireError as error:
            self.num_foreign += 1
            if key_owner is not None:
                self.unreadable.setdefault(key_owner, str(error))
            return None


def _endpoint(address: str, port: int | str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port}"


def _joined(frames: Sequence[zmq.Frame]) -> Payload:
    """The payload that came in these frames; a single one is not copied."""
    if len(frames) == 1:
        return frames[0].buffer
    payload = np.empty(sum(map(len, frames)), dtype=np.uint8)
    end = 0
    for frame in frames:
        begin, end = end, end + len(frame)
        payload[begin:end] = np.frombuffer(frame.buffer, dtype=np.uint8)
    return payload.data
