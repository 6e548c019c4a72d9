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
| "aes-gcm" | who knows a rank's token | encrypted and authenticated here, by AES-256-GCM |
| "none" | who knows a rank's token | as it is, with a checksum |

With AES-GCM every connection has a key of its own in each direction,

    key = HKDF-SHA256(run secret, salts of receiver and sender,
                      label | generation | sender | receiver)

Each rank draws a salt when it begins to listen. The receiver's is part of its endpoint, the
sender's of each header, so what was recorded of another connection opens nothing here. A nonce is
the number of the message and that of the frame in it, 96 bits together; a sender counts its
messages, so none is used twice with a key. What is repeated has a number that was there before,
which the inbox ignores.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import os
import secrets
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
import zmq
from typing_extensions import override
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from offbeat.errors import ConfigError, WireError
from offbeat.transport.operations import Payload

Cipher: TypeAlias = Literal["curve", "aes-gcm", "none"]

CIPHER_VARIABLE: Final = "OFFBEAT_CIPHER"
SALT_BYTES: Final = 16
SEAL_BYTES: Final = 16
"""What is added to each frame."""

_KEY_LABEL = b"offbeat message key 1"
_NONCE = struct.Struct("<QI")

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
        ConfigError: it is no cipher that this machine has.
    """
    name = os.environ.get(CIPHER_VARIABLE) or "curve"
    known: dict[str, Cipher] = {cipher: cipher for cipher in get_args(Cipher)}
    if name not in known:
        raise ConfigError(f"{CIPHER_VARIABLE} is {name!r}, allowed are {', '.join(known)}")
    if name == "aes-gcm" and importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            f"{CIPHER_VARIABLE}=aes-gcm needs the package cryptography on every rank; pip install"
            " 'offbeat[aes]', or use curve"
        )
    return known[name]


def connection_key(
    run_secret: bytes,
    *,
    receiver_salt: bytes,
    sender_salt: bytes,
    generation: int,
    sender: int,
    receiver: int,
) -> bytes:
    """The key of what `sender` sends to `receiver`, 32 bytes.

    Args:
        run_secret: 16 bytes or more.
        receiver_salt: `SALT_BYTES` that the receiver drew.
        sender_salt: `SALT_BYTES` that the sender drew.
        generation: of the membership, < 2**32.
        sender: a rank, < 2**32.
        receiver: a rank, < 2**32.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = _KEY_LABEL + _PARTIES.pack(generation, sender, receiver)
    salt = receiver_salt + sender_salt
    key: bytes = HKDF(SHA256(), length=32, salt=salt, info=info).derive(run_secret)
    return key


class Sealer:
    """Seals what goes over one connection in one direction.

    Args:
        key: of that connection and direction, 32 bytes, used nowhere else.
        salt: the sender's, which goes along.
    """

    def __init__(self, key: bytes, *, salt: bytes) -> None:
        self._aead = _aes_gcm(key)
        self._salt = salt
        self._next_sequence = 0

    def seal(
        self, sequence: int, header: bytes, frames: Sequence[memoryview]
    ) -> tuple[bytes, list[bytes]]:
        """The frames to send in place of `header`, which stays readable, and of `frames`.

        Args:
            sequence: the number of the message, larger than that of the one before.
            header: is authenticated.
            frames: are encrypted and authenticated.
        """
        if sequence < self._next_sequence:
            raise AssertionError("a nonce would be used twice")
        self._next_sequence = sequence + 1
        known = header + self._salt
        sealed = known + self._aead.encrypt(_NONCE.pack(sequence, 0), b"", known)
        return sealed, [
            self._aead.encrypt(_NONCE.pack(sequence, number), frame, None)
            for number, frame in enumerate(frames, start=1)
        ]


class Opener:
    """Opens what one sender has sealed for one receiver.

    Args:
        run_secret: 16 bytes or more.
        salt: the receiver's.
        generation: of the membership.
        sender: a rank.
        receiver: a rank.
    """

    def __init__(
        self, run_secret: bytes, *, salt: bytes, generation: int, sender: int, receiver: int
    ) -> None:
        self._secret, self._salt = run_secret, salt
        self._generation, self._sender, self._receiver = generation, sender, receiver
        # That of the first message whose seal was whole. A sender draws only one.
        self._sender_salt = b""
        self._aead: Any = None

    def open(
        self, sequence: int, header: Payload, seal: Payload, frames: Sequence[Payload]
    ) -> Payload:
        """What was in `frames`, joined.

        Args:
            sequence: the number that the header says.
            header: as the sender gave it to `Sealer.seal`.
            seal: what followed the header.
            frames: sealed.

        Raises:
            WireError: somebody has altered them, or they were sealed for another connection.
        """
        from cryptography.exceptions import InvalidTag

        sizes = [len(frame) - SEAL_BYTES for frame in frames]
        if len(seal) != SALT_BYTES + SEAL_BYTES or min(sizes) < 0:
            raise self._refused("it is truncated")
        sender_salt, tag = bytes(seal[:SALT_BYTES]), bytes(seal[SALT_BYTES:])
        if self._sender_salt and sender_salt != self._sender_salt:
            raise self._refused("it is of another connection")
        aead = self._aead
        if not self._sender_salt:
            key = connection_key(
                self._secret,
                receiver_salt=self._salt,
                sender_salt=sender_salt,
                generation=self._generation,
                sender=self._sender,
                receiver=self._receiver,
            )
            aead = _aes_gcm(key)
        payload = np.empty(sum(sizes), np.uint8)
        try:
            aead.decrypt(_NONCE.pack(sequence, 0), tag, bytes(header) + sender_salt)
            self._aead, self._sender_salt = aead, sender_salt
            begin = 0
            for number, (frame, size) in enumerate(zip(frames, sizes, strict=True), start=1):
                part = payload[begin : begin + size].data
                aead.decrypt_into(_NONCE.pack(sequence, number), frame, None, part)
                begin += size
        except InvalidTag as error:
            raise self._refused("its seal is broken") from error
        return payload.data

    def _refused(self, why: str) -> WireError:
        return WireError(
            f"a message that was to be rank {self._sender}'s was refused: {why}; somebody on the"
            " way may have altered or repeated it"
        )


def _aes_gcm(key: bytes) -> Any:
    # Imported where it is used: the package is an optional extra.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


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
        with_checksum: whether a message needs one, since it has no seal.
        seal_bytes: what follows a header.
        endpoint_suffix: what peers need to know beside the address.

    Raises:
        ConfigError: the secret is too short.
    """

    with_checksum: ClassVar[bool] = False
    seal_bytes: ClassVar[int] = 0
    endpoint_suffix: str = field(default="", init=False)
    run_secret: bytes
    generation: int
    world_size: int
    rank: int

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

    @abstractmethod
    def rank_of(self, user_id: bytes) -> int | None:
        """The rank that came in as `user_id`; None for a stranger."""

    def sealer(self, peer: int, endpoint_suffix: str) -> Sealer | None:
        """What seals messages to `peer`; None where nothing does.

        Raises:
            ConfigError: the suffix of the peer's endpoint is not that of this cipher.
        """
        if endpoint_suffix:
            raise ConfigError(
                f"rank {peer} listens with another cipher than rank {self.rank}; set"
                " OFFBEAT_CIPHER alike on all ranks"
            )
        return None

    def opener(self, peer: int) -> Opener | None:
        """What opens messages of `peer`; None where they are not sealed."""
        return None


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

    @override
    def rank_of(self, user_id: bytes) -> int | None:
        return self._rank_of.get(user_id)


class TokenProtection(Protection):
    """A peer that comes in shows a token that only holders of the run's secret can make. Nothing is
    encrypted: who reads the network sees tokens and messages.
    """

    with_checksum = True

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

    @override
    def rank_of(self, user_id: bytes) -> int | None:
        ranks = (rank for rank in range(self.world_size) if str(rank).encode() == user_id)
        return next(ranks, None)

    def _token(self, sender: int, receiver: int) -> bytes:
        parties = _PARTIES.pack(self.generation, sender, receiver)
        return hmac.digest(self.run_secret, _TOKEN_LABEL + parties, hashlib.sha256).hex().encode()


class SealProtection(TokenProtection):
    """A peer shows a token, and each message is sealed by AES-GCM."""

    with_checksum = False
    seal_bytes = SALT_BYTES + SEAL_BYTES

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._salt = secrets.token_bytes(SALT_BYTES)
        self.endpoint_suffix = f"#{self._salt.hex()}"

    @override
    def sealer(self, peer: int, endpoint_suffix: str) -> Sealer | None:
        try:
            receiver_salt = bytes.fromhex(endpoint_suffix.removeprefix("#"))
        except ValueError:
            receiver_salt = b""
        if len(receiver_salt) != SALT_BYTES:
            super().sealer(peer, "another one")
        key = connection_key(
            self.run_secret,
            receiver_salt=receiver_salt,
            sender_salt=self._salt,
            generation=self.generation,
            sender=self.rank,
            receiver=peer,
        )
        return Sealer(key, salt=self._salt)

    @override
    def opener(self, peer: int) -> Opener | None:
        return Opener(
            self.run_secret,
            salt=self._salt,
            generation=self.generation,
            sender=peer,
            receiver=self.rank,
        )


PROTECTIONS: Final[Mapping[Cipher, type[Protection]]] = {
    "curve": CurveProtection,
    "aes-gcm": SealProtection,
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
    try:
        # A copy of the descriptor keeps its meaning while it is looked at: the connection may be
        # gone already, and the number stand for another file.
        copy = os.dup(descriptor)
    except OSError:
        return
    try:
        with socket.socket(fileno=copy) as connection:
            connection.getpeername()  # fails for the listening socket, which must not end
            if connection.getsockname()[1] == int(endpoint.rpartition(":")[2]):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
