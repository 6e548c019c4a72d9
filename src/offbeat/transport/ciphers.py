"""AES-GCM between two ranks, and which cipher a run has: `OFFBEAT_CIPHER`, the same on every rank.

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

import importlib.util
import os
import struct
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from offbeat.errors import ConfigError, WireError
from offbeat.transport.operations import Payload

Cipher: TypeAlias = Literal["curve", "aes-gcm", "none"]

CIPHER_VARIABLE: Final = "OFFBEAT_CIPHER"
SALT_BYTES: Final = 16
SEAL_BYTES: Final = 16
"""What is added to each frame."""

_KEY_LABEL = b"offbeat message key 1"
_NONCE = struct.Struct("<QI")
_PARTIES = struct.Struct("<III")


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
