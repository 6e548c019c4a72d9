"""By cipher: what a rank does to its sockets and messages so that only the run is heard."""

from __future__ import annotations

import hashlib
import hmac
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import zmq
from typing_extensions import override
from zmq.utils import z85

from offbeat.errors import ConfigError
from offbeat.transport.ciphers import (
    SALT_BYTES,
    SEAL_BYTES,
    Cipher,
    Opener,
    Sealer,
    checked_cipher,
    connection_key,
    drawn_salt,
)
from offbeat.transport.keys import ZAP_DOMAIN, Roster, check_secret

_TOKEN_LABEL = b"offbeat admission token 1"
_PARTIES = struct.Struct("<III")


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
        frame_seal_bytes: what is added to a frame.
        endpoint_suffix: what peers need to know beside the address.

    Raises:
        ConfigError: the secret is too short.
    """

    with_checksum: ClassVar[bool] = False
    seal_bytes: ClassVar[int] = 0
    frame_seal_bytes: ClassVar[int] = 0
    endpoint_suffix: str = ""

    def __init__(self, run_secret: bytes, *, generation: int, world_size: int, rank: int) -> None:
        check_secret(run_secret)
        self.world_size = world_size
        self._secret, self._generation, self._rank = run_secret, generation, rank

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
                f"rank {peer} listens with another cipher than rank {self._rank}; set"
                " OFFBEAT_CIPHER alike on all ranks"
            )
        return None

    def opener(self, peer: int) -> Opener | None:
        """What opens messages of `peer`; None where they are not sealed."""
        return None


class CurveProtection(Protection):
    """Connections are encrypted and authenticated by ZeroMQ."""

    def __init__(self, run_secret: bytes, *, generation: int, world_size: int, rank: int) -> None:
        super().__init__(run_secret, generation=generation, world_size=world_size, rank=rank)
        self._roster = Roster(run_secret, generation=generation, world_size=world_size)

    @override
    def guard_listener(self, listening: zmq.Socket[bytes]) -> None:
        listening.curve_server = True
        listening.curve_secretkey = self._roster.pairs[self._rank].secret
        listening.zap_domain = ZAP_DOMAIN.encode()

    @override
    def guard_link(self, sending: zmq.Socket[bytes], peer: int) -> None:
        sending.curve_publickey = self._roster.pairs[self._rank].public
        sending.curve_secretkey = self._roster.pairs[self._rank].secret
        sending.curve_serverkey = self._roster.pairs[peer].public

    @override
    def user_id(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes:
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        return key if self._roster.rank_of(key) is not None else b""

    @override
    def rank_of(self, user_id: bytes) -> int | None:
        return self._roster.rank_of(user_id)


class TokenProtection(Protection):
    """Whoever comes in shows a token that only holders of the run's secret can make. Nothing is
    encrypted: who reads the network sees tokens and messages.
    """

    with_checksum = True

    @override
    def guard_listener(self, listening: zmq.Socket[bytes]) -> None:
        listening.plain_server = True
        listening.zap_domain = ZAP_DOMAIN.encode()

    @override
    def guard_link(self, sending: zmq.Socket[bytes], peer: int) -> None:
        sending.plain_username = str(self._rank).encode()
        sending.plain_password = self._token(self._rank, peer)

    @override
    def user_id(self, mechanism: bytes, credentials: Sequence[bytes]) -> bytes:
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return b""
        sender = self.rank_of(credentials[0])
        if sender is None or not hmac.compare_digest(
            credentials[1], self._token(sender, self._rank)
        ):
            return b""
        return bytes(credentials[0])

    @override
    def rank_of(self, user_id: bytes) -> int | None:
        ranks = (rank for rank in range(self.world_size) if str(rank).encode() == user_id)
        return next(ranks, None)

    def _token(self, sender: int, receiver: int) -> bytes:
        parties = _PARTIES.pack(self._generation, sender, receiver)
        return hmac.digest(self._secret, _TOKEN_LABEL + parties, hashlib.sha256).hex().encode()


class SealProtection(TokenProtection):
    """As `TokenProtection`, and each message is sealed by AES-GCM."""

    with_checksum = False
    seal_bytes = SALT_BYTES + SEAL_BYTES
    frame_seal_bytes = SEAL_BYTES

    def __init__(self, run_secret: bytes, *, generation: int, world_size: int, rank: int) -> None:
        super().__init__(run_secret, generation=generation, world_size=world_size, rank=rank)
        self._salt = drawn_salt()
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
            self._secret,
            receiver_salt=receiver_salt,
            sender_salt=self._salt,
            generation=self._generation,
            sender=self._rank,
            receiver=peer,
        )
        return Sealer(key, salt=self._salt)

    @override
    def opener(self, peer: int) -> Opener | None:
        return Opener(
            self._secret,
            salt=self._salt,
            generation=self._generation,
            sender=peer,
            receiver=self._rank,
        )


_BY_CIPHER: dict[Cipher, type[Protection]] = {
    "curve": CurveProtection,
    "aes-gcm": SealProtection,
    "none": TokenProtection,
}


def protection_of(
    cipher: Cipher, run_secret: bytes, *, generation: int, world_size: int, rank: int
) -> Protection:
    """That of `cipher`. Raises `ConfigError` for one that this machine lacks, and as `Protection`.

    Args:
        cipher: the same on all ranks.
        run_secret: as for `Protection`.
        generation: as for `Protection`.
        world_size: as for `Protection`.
        rank: as for `Protection`.
    """
    kind = _BY_CIPHER[checked_cipher(cipher)]
    return kind(run_secret, generation=generation, world_size=world_size, rank=rank)
