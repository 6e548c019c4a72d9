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

from offbeat.errors import ConfigError, WireError
from offbeat.transport.admission import Admission
from offbeat.transport.envelope import Envelope, parse
from offbeat.transport.keys import ZAP_DOMAIN, Roster
from offbeat.transport.link import FRAME_BYTES, PeerLimits, has_message, num_frames
from offbeat.transport.operations import Payload

# what encryption and framing add to a frame; generous, it only bounds memory
_OVERHEAD_BYTES = 1024


class Listener:
    """Receives from every rank of one generation.

    Attributes:
        endpoint: where it listens, "tcp://address:port".
        num_foreign: messages dropped because they are malformed, of another generation, or not of
            the rank whose key they came with.
        unreadable: by the rank whose key they came with, why the first of these was dropped.
    """

    def __init__(
        self, address: str, *, rank: int, generation: int, roster: Roster, limits: PeerLimits
    ) -> None:
        """Bind a free port.

        Args:
            address: numeric address of this host, no wildcard.
            rank: this rank.
            generation: number of the membership; messages of another one are dropped.
            roster: the keys of all ranks.
            limits: how long a handshake may take, and when a connection counts as lost.

        Raises:
            ConfigError: `address` is no numeric address of this host.
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
        self._roster = roster
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._admission = Admission(self._context, self._socket, roster)
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
        self._socket.curve_server = True
        self._socket.curve_secretkey = roster.pairs[rank].secret
        self._socket.zap_domain = ZAP_DOMAIN.encode()
        try:
            self._socket.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {address!r}: {error}; give a numeric address of this host"
            ) from error
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

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
            if (envelope := self._admit(frames)) is not None:
                yield envelope, _joined(frames[1:])

    def close(self) -> None:
        """Stop listening and end the threads."""
        self._wakeup_receiver.close()
        self._wakeup_sender.close()
        self._admission.close_socket()
        self._admission.stop()
        self._context.term()

    def _admit(self, frames: Sequence[zmq.Frame]) -> Envelope | None:
        key_owner = self._roster.rank_of(str(frames[0].get("User-Id")).encode())
        try:
            envelope = parse(frames[0].buffer)
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
        except WireError as error:
            self.num_foreign += 1
            if key_owner is not None:
                self.unreadable.setdefault(key_owner, str(error))
            return None
        return envelope


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
