"""Sparse reduce-scatter and all-gather: the global top-k with O(k) traffic, for any world size.

    deal the indices out to owners in small blocks                     (codec.sparse.owner_of)
    send every owner its part of my entries; an owner adds up what it gets
    all-gather how many sums each owner has of each magnitude       (a few hundred counters)
    all ranks read off the magnitude that leaves k entries
    each owner keeps its sums above it and owes the rest
    all-gather what was kept

Owners see every contribution to their indices, so the sums are exact, and what is dropped is
dropped once, by one rank. Magnitudes are compared by their leading 16 bits (8 of the mantissa), so
the result is the exact top-k up to a relative 2**-8 in magnitude at the boundary: an entry that is
left out is at most that much larger than the smallest one kept. That holds while each owner's share
of the top-k lies within half and twice the mean, give or take `MARGIN` entries (codec.histogram);
an owner beyond that keeps a few entries too many or too few.

After Ok-Topk (Li and Hoefler, PPoPP 2022) and SparDL (arXiv 2304.00737). Differences: owners are
dealt blocks in turn where Ok-Topk re-balances regions by consensus; the threshold is agreed on in
each step where Ok-Topk re-uses it; nothing is re-sparsified on the way, as SparDL does.

Cost per step: P-1 + 2 ceil(log2 P) messages in sequence; 2 (P-1)/P k pairs sent by each rank, and
(P-1) c counters of 6 bytes, where c is at most 2 k / P + 128 and commonly one or two hundred.
"""

from __future__ import annotations

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.arithmetic.trees import num_rounds
from offbeat.codec.arithmetic import S, SparseArithmetic
from offbeat.codec.histogram import COUNTER_BYTES, EXPECTED_COUNTERS
from offbeat.codec.tally import Tally
from offbeat.collectives.base import Exchanged
from offbeat.collectives.gather import all_gather, gather_entries
from offbeat.transport.operations import Collective, Recv, Send


def sparse_reduce_scatter(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    """At most k entries of the exact sum: its k largest, up to a relative 2**-8 in magnitude.

    Args:
        rank: as of `SparseCollective`.
        world_size: likewise.
        mine: likewise.
        tally: likewise.
        k: likewise.
        wire: likewise.
    """
    parts = wire.partition(mine, world_size)
    owed, sums = wire.empty(), parts[rank]
    for distance in range(1, world_size):
        owner = (rank + distance) % world_size
        payload, rounding = wire.encode(parts[owner], tally)
        owed = wire.add(owed, rounding)
        yield Send(owner, payload)
    for distance in range(1, world_size):
        theirs, _ = wire.decode((yield Recv((rank - distance) % world_size)))
        sums = wire.add(sums, theirs)

    counters = wire.count_magnitudes(sums, k, world_size)
    counts = yield from all_gather(rank, world_size, counters, wire.read_counts, wire)
    kept, dropped = wire.keep_largest(sums, wire.quotas(counts, k)[rank])
    # Tallies are merged here, in the order of ranks: sums of weights depend on the order, and all
    # ranks must get the same.
    regions, rounding, tally = yield from gather_entries(rank, world_size, kept, tally, wire)
    owed = wire.add(wire.add(owed, dropped), rounding)
    return Exchanged(kept=wire.union_disjoint(regions), owed=owed, tally=tally)


def cost_s(*, world_size: int, k: int, pair_bytes: float, network: NetworkCosts) -> float:
    """(P-1 + 2 log2 P) alpha + (2 (P-1)/P k pairs + (P-1) c counters) beta, and k entries
    that are read twice.

    Args:
        world_size: P, >= 1.
        k: how many pairs each rank contributes.
        pair_bytes: of one pair in a message.
        network: what messages cost.
    """
    num_bytes = (
        2 * (world_size - 1) / world_size * k * pair_bytes
        + (world_size - 1) * EXPECTED_COUNTERS * COUNTER_BYTES
    )
    messages = world_size - 1 + 2 * num_rounds(world_size)
    on_links_s = network.messages.time_s(num_messages=messages, num_bytes=num_bytes)
    return on_links_s + network.entries_s(k, read_again=1)
