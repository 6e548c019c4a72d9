"""Who may talk: what a rank does, by cipher, to its sockets and messages so that only the run is
heard.

Every rank derives every CURVE key pair from the run's secret, so nothing but the secret has to be
handed out:

    secret key = HMAC-SHA256(run secret, label | generation | rank)

That keeps strangers out. It does not protect ranks from each other: a process that holds the run's
secret can be any rank. A new generation (after a change of membership) has new keys, so a late
worker of an earlier one is a stranger too.

Which cipher a run has is said by `OFFBEAT_CIPHER`, the same on every rank:

| cipher | who may connect | what is sent |
|---|---|---|
| "curve" | who has a key of the run | encrypted and authenticated by ZeroMQ's CURVE |
| "none" | who knows a rank's token | as it is, with a checksum |
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import zmq
from typing_extensions import override
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import ConfigError
from offbeat.transport.sockets import copied_end

Cipher: TypeAlias = Literal["curve", "none"]

CIPHER_VARIABLE: Final = "OFFBEAT_CIPHER"

MIN_SECRET_BYTES = 16
ZAP_DOMAIN = "offbeat"
_LABEL = b"offbeat curve key 1"


_TOKEN_LABEL = b"offbeat admission token 1"

_PARTIES = struct.Struct("<III")

SPARE_CONNECTIONS: Final = 32
"""Connections that a listening socket holds beside two of each rank, whose old one may not have
ended yet when the new one comes."""

_REQUESTS: Final = "inproc://zeromq.zap.01"

_VERSION: Final = b"1.0"  # of ZeroMQ's authentication protocol, https://rfc.zeromq.org/spec/27


def cipher_from_environment() -> Cipher:
    """What `OFFBEAT_CIPHER` says; "curve" where it is not set.

    Raises:
        ConfigError: it is no cipher.
    """
    name = os.environ.get(CIPHER_VARIABLE) or "curve"
    known: dict[str, Cipher] = {cipher: cipher for cipher in get_args(Cipher)}
    if name not in known:
        raise ConfigError(f"{CIPHER_VARIABLE} is {name!r}, allowed are {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def check_secret(run_secret: bytes) -> None:
    """Raises `ConfigError` for a `run_secret` below 16 bytes."""
    if len(run_secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the run's secret has {len(run_secret)} bytes, needed are {MIN_SECRET_BYTES} or more; "
            "draw one with secrets.token_bytes(32) and give every rank the same"
        )


def key_pair(run_secret: bytes, *, generation: int, rank: int) -> KeyPair:
    """The key pair of `rank` in `generation` (both < 2**32). Raises `ConfigError` for a
    `run_secret` below 16 bytes.
    """
    check_secret(run_secret)
    digest = hmac.digest(run_secret, _LABEL + struct.pack("<II", generation, rank), hashlib.sha256)
    secret = z85.encode(digest)
    return KeyPair(zmq.curve_public(secret), secret)


@dataclass(kw_only=True, repr=False, eq=False)
class Protection(ABC):
    """What belongs to `rank` in one generation.

    Args:
        run_secret: 16 bytes or more.
        generation: of the membership, < 2**32.
        world_size: number of ranks.
        rank: this rank.

    Attributes:
        with_checksum: whether a message needs one, since nothing encrypts it.

    Raises:
        ConfigError: the secret is too short.
    """

    with_checksum: ClassVar[bool] = False
    run_secret: bytes
    generation: int
    world_size: int
    rank: int
    _rank_of: dict[bytes, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_secret(self.run_secret)

    @abstractmethod
    def guard_listener(self, listening: zmq.Socket[bytes]) -> None:
        """Let `listening` ask, by ZAP, who may come in. It is not bound yet."""

    @abstractmethod
    def guard_link(self, sending: zmq.Socket[bytes], peer: int) -> None:
        """Let `sending` show who this rank is. It is not connected yet."""

    @abstractmethod
    def user_id(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes:
        """As whom a client with these credentials comes in; empty for a stranger. May be called
        from any thread.
        """

    def rank_of(self, user_id: bytes) -> int | None:
        """The rank that came in as `user_id`; None for a stranger."""
        return self._rank_of.get(user_id)


class CurveProtection(Protection):
    """Connections are encrypted and authenticated by ZeroMQ."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._pairs = [
            key_pair(self.run_secret, generation=self.generation, rank=rank)
            for rank in range(self.world_size)
        ]
        self._rank_of = {pair.public: rank for rank, pair in enumerate(self._pairs)}

    @override
    def guard_listener(self, listening: zmq.Socket[bytes]) -> None:
        listening.curve_server = True
        listening.curve_secretkey = self._pairs[self.rank].secret
        listening.zap_domain = ZAP_DOMAIN.encode()

    @override
    def guard_link(self, sending: zmq.Socket[bytes], peer: int) -> None:
        sending.curve_publickey = self._pairs[self.rank].public
        sending.curve_secretkey = self._pairs[self.rank].secret
        sending.curve_serverkey = self._pairs[peer].public

    @override
    def user_id(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes:
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        return key if key in self._rank_of else b""


class TokenProtection(Protection):
    """A peer that comes in shows a token that only holders of the run's secret can make. Nothing is
    encrypted: who reads the network sees tokens and messages.
    """

    with_checksum = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._rank_of = {str(rank).encode(): rank for rank in range(self.world_size)}

    @override
    def guard_listener(self, listening: zmq.Socket[bytes]) -> None:
        listening.plain_server = True
        listening.zap_domain = ZAP_DOMAIN.encode()

    @override
    def guard_link(self, sending: zmq.Socket[bytes], peer: int) -> None:
        sending.plain_username = str(self.rank).encode()
        sending.plain_password = self._token(self.rank, peer)

    @override
    def user_id(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes:
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return b""
        sender = self.rank_of(credentials[0])
        is_known = sender is not None and hmac.compare_digest(
            credentials[1], self._token(sender, self.rank)
        )
        return bytes(credentials[0]) if is_known else b""

    def _token(self, sender: int, receiver: int) -> bytes:
        parties = _PARTIES.pack(self.generation, sender, receiver)
        return hmac.digest(self.run_secret, _TOKEN_LABEL + parties, hashlib.sha256).hex().encode()


PROTECTIONS: Final[Mapping[Cipher, type[Protection]]] = {
    "curve": CurveProtection,
    "none": TokenProtection,
}
"""By cipher, which is the same on all ranks."""


class Admission:
    """Answers, in a thread of its own, which keys may come in, and ends connections that are too
    many.

    Anybody who reaches the port can open connections and be silent, or send what is no handshake.
    Three limits hold for those who have not shown a key of the run: how many there are (here), how
    long they may take, and how large a frame they may announce (both in `Listener`).

    Make it before the socket is bound, and close the socket before it is stopped.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: zmq.Socket[bytes],
        protection: Protection,
    ) -> None:
        """Start the thread.

        Args:
            context: of the socket.
            listening: a server that is not bound yet.
            protection: says who comes in.
        """
        self._protection = protection
        self._most = 2 * protection.world_size + SPARE_CONNECTIONS
        self._listening = listening
        self._requests = context.socket(zmq.REP)
        self._requests.linger = 0
        self._requests.bind(_REQUESTS)
        self._events = listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stopped, self._stop = socket.socketpair()
        # The file descriptors of connections that are open.
        self._open: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="offbeat-admission", daemon=True)
        self._thread.start()

    def close_socket(self) -> None:
        """Close the socket."""
        # The I/O thread waits while it has more events to tell than the monitor holds, and
        # `disable_monitor` waits for the I/O thread: so the thread here still reads meanwhile.
        self._listening.disable_monitor()
        self._listening.close(linger=0)

    def stop(self) -> None:
        """End the thread."""
        self._stop.send(b"!")
        self._thread.join()
        for end in (self._stop, self._stopped):
            end.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._requests, self._events, self._stopped):
            poller.register(source, zmq.POLLIN)
        while self._stopped.fileno() not in (ready := dict(poller.poll())):
            if self._requests in ready:
                self._answer()
            elif self._events in ready:
                self._count()
        self._requests.close()
        self._events.close(linger=0)

    def _answer(self) -> None:
        """Say whether one client may come in, and as whom."""
        _, request, domain, _, _, mechanism, *credentials = self._requests.recv_multipart()
        # That the client has connected was told before. If it is to go, it goes before it is let
        # in, since a rank that is let in sends messages, which would be lost.
        self._count()
        user = b""
        if domain == ZAP_DOMAIN.encode():
            user = self._protection.user_id(mechanism, credentials)
        status, reason = (b"200", b"OK") if user else (b"400", b"Unknown key")
        self._requests.send_multipart([_VERSION, request, status, reason, user, b""])

    def _count(self) -> None:
        """Take in which connections came and went. Those that are too many end at once."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                continue
            self._open.add(descriptor)
            # The newest goes: those who came before may be ranks.
            if len(self._open) > self._most:
                _end_connection(descriptor, event["endpoint"].decode())


def _end_connection(descriptor: int, endpoint: str) -> None:
    """Let ZeroMQ find that the connection has ended. It then closes the descriptor, which is its
    own.
    """
    with suppress(OSError), copied_end(descriptor) as connection:
        connection.getpeername()  # fails for the listening socket, which must not end
        if connection.getsockname()[1] == int(endpoint.rpartition(":")[2]):
            connection.shutdown(socket.SHUT_RDWR)
