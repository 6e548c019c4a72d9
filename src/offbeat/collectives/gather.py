"""All-gather of messages of any length, for any world size (Bruck's algorithm).

In round j each rank passes all it has, at most 2**j blocks, to the rank 2**j below it: ceil(log2 P)
rounds, and every rank sends P-1 blocks altogether, which is the least possible. What has arrived is
read while the next round's blocks are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeVar

import numpy as np

from offbeat.codec.arithmetic import BlockArithmetic, S, SparseArithmetic
from offbeat.codec.model_wire import Counters
from offbeat.codec.tally import Tally
from offbeat.codec.wire import ByteBlocks
from offbeat.errors import WireError
from offbeat.transport.operations import Collective, Payload, Recv, Send

T = TypeVar("T")


def all_gather(
    rank: int,
    world_size: int,
    mine: Payload,
    read: Callable[[Payload], T],
    arithmetic: BlockArithmetic = ByteBlocks(),
) -> Collective[list[T]]:
    """Every rank's payload, by rank, as `read` understands it; this rank's own too.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's payload.
        read: what to make of a payload.
        arithmetic: how payloads travel together.

    Raises:
        WireError: a message is damaged.
    """
    blocks: list[Payload] = [mine]  # blocks[i] is from rank + i
    results: list[T] = []
    distance = 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        yield Send((rank - distance) % world_size, arithmetic.join(blocks[:count]))
        results += map(read, blocks[len(results) :])
        blocks += arithmetic.split((yield Recv((rank + distance) % world_size)), count)
        distance *= 2
    results += map(read, blocks[len(results) :])
    return [results[(source - rank) % world_size] for source in range(world_size)]


def gather_entries(
    rank: int, world_size: int, mine: S, tally: Tally, wire: SparseArithmetic[S]
) -> Collective[tuple[Sequence[S], S, Tally]]:
    """All ranks' entries, by rank; what rounding took from this rank's; the tally of all.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's entries.
        tally: that its message brings.
        wire: layout of the messages.
    """
    payload, rounding = wire.encode(mine, tally)
    entries, tallies = zip(
        *(yield from all_gather(rank, world_size, payload, wire.decode, wire)), strict=True
    )
    return entries, rounding, reduce(Tally.merge, tallies)


def gather_largest(
    position: int, parties: Sequence[bool], counters: Counters
) -> Collective[Counters]:
    """The largest that a member whose model is averaged has counted in each integer buffer.

    Args:
        position: of this rank.
        parties: by position: whether it is such a member.
        counters: what this rank has counted, shape (any,).
    """
    own = counters.tobytes() if parties[position] else b""
    payloads = yield from all_gather(position, len(parties), own, bytes)
    for sender, payload in enumerate(payloads):
        if len(payload) not in (0, counters.nbytes):
            raise WireError(
                f"member {sender} sent {len(payload)} bytes of integer buffers, expected were"
                f" {counters.nbytes}; do all ranks train the same model?"
            )
    largest: Counters = np.max(
        [np.frombuffer(payload, np.int64) for payload in payloads if payload], axis=0
    )
    return largest
