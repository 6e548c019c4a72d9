"""Several messages as one: each behind its length, 8 bytes, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from offbeat.codec.arithmetic import Message
from offbeat.errors import WireError

_LENGTH = struct.Struct("<Q")

LENGTH_BYTES: Final = _LENGTH.size
"""What a block takes besides its content."""


def join_blocks(blocks: Sequence[Message]) -> bytes:
    """One message of all of them.

    >>> split_blocks(join_blocks([b"ab", b""]), 2) == [b"ab", b""]
    True
    """
    return b"".join(part for block in blocks for part in (_LENGTH.pack(len(block)), block))


def split_blocks(message: Message, count: int) -> list[Message]:
    """Inverse of `join_blocks`; copies nothing. Raises `WireError` unless `message` holds exactly
    `count` blocks.
    """
    view = memoryview(message)
    blocks: list[Message] = []
    for _ in range(count):
        if len(view) < _LENGTH.size:
            raise WireError(f"an all-gather message ends after {len(blocks)} of {count} blocks")
        (length,) = _LENGTH.unpack_from(view)
        view = view[_LENGTH.size :]
        if len(view) < length:
            raise WireError(f"an all-gather block of {length} bytes has only {len(view)}")
        blocks.append(view[:length])
        view = view[length:]
    if len(view):
        raise WireError(f"an all-gather message has {len(view)} bytes too many")
    return blocks


class ByteBlocks:
    """Joins and splits messages that are bytes."""

    def join(self, blocks: Sequence[Message]) -> Message:
        return join_blocks(blocks)

    def split(self, message: Message, count: int) -> list[Message]:
        return split_blocks(message, count)


BYTE_BLOCKS: Final = ByteBlocks()
