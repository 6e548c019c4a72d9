"""Who may talk: CURVE key pairs of a run's ranks; `protection` lets in only these.

Every rank derives every key pair from the run's secret, so nothing but the secret has to be handed
out:

    secret key = HMAC-SHA256(run secret, label | generation | rank)

That keeps strangers out. It does not protect ranks from each other: whoever holds the run's secret
can be any rank. A new generation (after a change of membership) has new keys, so a late worker of
an earlier one is a stranger too.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from offbeat.errors import ConfigError

MIN_SECRET_BYTES = 16
ZAP_DOMAIN = "offbeat"
_LABEL = b"offbeat curve key 1"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


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


class Roster:
    """The key pairs of all ranks of one generation, and which rank a public key belongs to."""

    def __init__(self, run_secret: bytes, *, generation: int, world_size: int) -> None:
        self.pairs = [
            key_pair(run_secret, generation=generation, rank=rank) for rank in range(world_size)
        ]
        self._rank_of = {pair.public: rank for rank, pair in enumerate(self.pairs)}

    def rank_of(self, public: bytes) -> int | None:
        """The rank whose public key this is; None for a stranger."""
        return self._rank_of.get(public)
