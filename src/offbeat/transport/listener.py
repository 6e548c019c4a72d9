"""The listening side of the peers driver: one encrypted socket that lets in the run's own ranks and
nobody else.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Sequence

import zmq

from offbeat.errors import ConfigError, WireError
from offbeat.transport.envelope import Envelope, parse
from offbeat.transport.keys import ZAP_DOMAIN, Roster, start_authenticator
from offbeat.transport.operations import Payload

# what encryption and framing add to a payload; generous, it only bounds memory
_OVERHEAD_BYTES = 1024


class Listener:
    """Receives from every rank of one generation.

    Attributes:
        endpoint: where it listens, "tcp://address:port".
        num_foreign: messages dropped because they are malformed, of another generation, or not of
            the rank whose key they came with.
    """

    def __init__(
        self, address: str, *, rank: int, generation: int, roster: Roster, max_message_bytes: int
    ) -> None:
        """Bind a free port.

        Args:
            address: numeric address of this host, no wildcard.
            rank: this rank.
            generation: number of the membership; messages of another one are dropped.
            roster: the keys of all ranks.
            max_message_bytes: largest payload of a message.

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
        self._generation = generation
        self._roster = roster
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = start_authenticator(self._context, roster)
        self._socket = self._context.socket(zmq.PULL)
        # ZeroMQ sockets belong to one thread; a socket pair is what other threads can wake it by.
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup_receiver, zmq.POLLIN)
        self._socket.rcvhwm = 0
        self._socket.ipv6 = ":" in address
        self._socket.maxmsgsize = max_message_bytes + _OVERHEAD_BYTES
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
        self._poller.poll(math.ceil(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wakeup_receiver.recv(4096)

    def wake(self) -> None:
        """Let the thread that waits return. Never blocks; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it anyway
            self._wakeup_sender.send(b"!")

    def drain(self) -> Iterator[tuple[Envelope, Payload]]:
        """Every message that has arrived and belongs here. Never blocks."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if (envelope := self._admit(frames)) is None:
                self.num_foreign += 1
            else:
                yield envelope, frames[1].buffer

    def close(self) -> None:
        """Stop listening and end the threads."""
        self._wakeup_receiver.close()
        self._wakeup_sender.close()
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()

    def _admit(self, frames: Sequence[zmq.Frame]) -> Envelope | None:
        try:
            envelope = parse(frames[0].buffer)
        except WireError:
            return None
        key_owner = self._roster.rank_of(str(frames[0].get("User-Id")).encode())
        belongs = (
            envelope.sender == key_owner
            and envelope.generation == self._generation
            and len(frames) == 2
        )
        return envelope if belongs else None
