"""The header that travels before every message between peers.

Layout, little-endian, 44 bytes: magic (4), wire version (u8), kind (u8), flags (u16: 1 has a
checksum), sender rank (u32), generation (u32), channel (u64), sequence (u64), payload length (u64),
CRC-32 of the payload (u32). The payload follows as its own frame.

A connection that is authenticated seals every frame, which finds what a checksum finds and more. So
there is one only where nothing else would notice an accident.

`sequence` counts all messages from this sender to this receiver. ZeroMQ reconnects by itself but
does not repeat what was in flight when a connection broke; a gap in the count turns that silent
loss into an error.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from offbeat.errors import WireError
from offbeat.transport.operations import Payload

_LAYOUT = struct.Struct("<4sBBHIIQQQI")
_MAGIC = b"ofbt"
WIRE_VERSION = 3
HEADER_BYTES = _LAYOUT.size
_HAS_CHECKSUM = 1


class EnvelopeKind(IntEnum):
    """What a message is."""

    DATA = 1
    GOODBYE = 2
    """The sender closed in good order; nothing follows."""
    ABORT = 3
    """The sender failed; the payload says why."""
    HELLO = 4
    """The sender's connection came back; its sequence shows whether messages were lost."""
    END = 5
    """The sender trains no more; what follows is on this message's channel."""


_KINDS = frozenset(EnvelopeKind)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A checked header, in the order in which its numbers travel."""

    kind: EnvelopeKind
    sender: int
    generation: int
    channel: int
    sequence: int
    num_bytes: int
    checksum: int | None


def pack(
    *,
    kind: EnvelopeKind,
    sender: int,
    generation: int,
    channel: int,
    sequence: int,
    payload: Payload,
    with_checksum: bool,
) -> bytes:
    """The header of a message.

    Args:
        kind: what the message is.
        sender: the rank that sends it, < 2**32.
        generation: number of the membership, < 2**32.
        channel: < 2**64.
        sequence: how many messages the sender has sent to the receiver before, < 2**64.
        payload: contiguous bytes, of which length and checksum are taken.
        with_checksum: whether nothing else would notice that the payload was altered.
    """
    flags, checksum = (_HAS_CHECKSUM, zlib.crc32(payload)) if with_checksum else (0, 0)
    numbers = sender, generation, channel, sequence, len(payload)
    return _LAYOUT.pack(_MAGIC, WIRE_VERSION, kind, flags, *numbers, checksum)


def parse(header: Payload) -> Envelope:
    """Inverse of `pack`. Raises `WireError` for anything that `pack` of this version
    did not write.
    """
    if len(header) != HEADER_BYTES:
        raise WireError(
            f"a message header has {HEADER_BYTES} bytes, got {len(header)}; is the sender an"
            " offbeat worker?"
        )
    magic, version, kind, flags, sender, generation, channel, sequence, num_bytes, checksum = (
        _LAYOUT.unpack(header)
    )
    if magic != _MAGIC:
        raise WireError(
            f"a message starts with {_MAGIC!r}, got {magic!r}; is the sender an offbeat worker?"
        )
    if version != WIRE_VERSION:
        raise WireError(
            f"got a message of wire version {version}, this worker speaks version {WIRE_VERSION}; "
            "install the same offbeat on every node"
        )
    if flags > _HAS_CHECKSUM or kind not in _KINDS or (checksum and not flags):
        raise WireError(
            f"got a message of kind {kind}, flags {flags}; allowed are kinds"
            f" {sorted(map(int, _KINDS))} and flags 0 and 1; it is corrupt"
        )
    found = checksum if flags else None
    return Envelope(EnvelopeKind(kind), sender, generation, channel, sequence, num_bytes, found)


def verify(envelope: Envelope, payload: Payload) -> None:
    """Raise `WireError`, naming the sender, unless `payload` is the one that `envelope` was written
    for.
    """
    if len(payload) != envelope.num_bytes:
        raise WireError(
            f"a message of rank {envelope.sender} announced {envelope.num_bytes} bytes and holds"
            f" {len(payload)}; it was truncated or altered"
        )
    if envelope.checksum is not None and (found := zlib.crc32(payload)) != envelope.checksum:
        raise WireError(
            f"a message of rank {envelope.sender} ({envelope.num_bytes} bytes) has checksum"
            f" {found:08x}, announced was {envelope.checksum:08x}; its bytes changed on the way:"
            " check that node's memory and network card"
        )
