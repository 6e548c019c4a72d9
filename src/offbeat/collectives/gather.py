"""All-gather of messages of any length, for any world size (Bruck's algorithm).

In round j each rank passes all it has, at most 2**j blocks, to the rank 2**j below it: ceil(log2 P)
rounds, and every rank sends P-1 blocks altogether, which is the least possible. What has arrived is
read while the next round's blocks are on their way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Payload, Recv, Send

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")


def all_gather(
    rank: int, world_size: int, mine: Payload, read: Callable[[Payload], T]
) -> Collective[list[T]]:
    """Every rank's payload, by rank, as `read` understands it; this rank's own too.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's payload.
        read: what to make of a payload.

    Raises:
        WireError: a message is damaged.
    """
    blocks: list[Payload] = [mine]  # blocks[i] is from rank + i
    results: list[T] = []
    distance = 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        yield Send((rank - distance) % world_size, _join(blocks[:count]))
        results += map(read, blocks[len(results) :])
        blocks += _split((yield Recv((rank + distance) % world_size)), count)
        distance *= 2
    results += map(read, blocks[len(results) :])
    return [results[(source - rank) % world_size] for source in range(world_size)]


def _join(blocks: list[Payload]) -> bytes:
    return b"".join(part for block in blocks for part in (_LENGTH.pack(len(block)), block))


def _split(message: Payload, count: int) -> list[Payload]:
    view = memoryview(message)
    blocks: list[Payload] = []
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
