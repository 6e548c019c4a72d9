"""All-gather of messages of any length, for any world size (Bruck's algorithm).

In round j each rank passes all it has, at most 2**j blocks, to the rank 2**j below it: ceil(log2 P) rounds, and every rank
sends P-1 blocks altogether, which is the least possible.
"""

from __future__ import annotations

import struct

from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Payload, Recv, Send

_LENGTH = struct.Struct("<Q")


def all_gather(rank: int, world_size: int, mine: Payload) -> Collective[list[Payload]]:
    """Every rank's payload, by rank."""
    blocks: list[Payload] = [mine]  # blocks[i] is from rank + i
    distance = 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        yield Send((rank - distance) % world_size, _join(blocks[:count]))
        blocks += _split((yield Recv((rank + distance) % world_size)), count)
        distance *= 2
    return [blocks[(source - rank) % world_size] for source in range(world_size)]


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
