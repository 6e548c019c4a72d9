"""gTopKAllReduce, the binomial tree of gTop-k S-SGD (arXiv 1901.04359, section III).

    for each round of a binomial tree towards rank 0:
        a sender hands its k pairs to its partner and is done
        a receiver adds them to its own and keeps the k largest
    rank 0 broadcasts its k pairs

The merge is not associative: the result approximates the top-k of the sum and depends on the order
of ranks.

Differences from the paper:
- any world size: a rank without a partner sits the round out (the published code needs a power of
  two);
- `variant="conserving"`: whoever drops an entry in a merge owes it. The paper puts an entry back
  only if its index is missing from the final set, so an entry dropped on one branch whose index
  survives through another is lost for ever. `variant="paper"` does just that, for comparison.

Cost per step: 2 ceil(log2 P) messages in sequence, 2 k ceil(log2 P) pairs through the busiest rank.

A patent on this procedure exists (US 11,436,065); judge for yourself whether that matters to you.
The sparse reduce-scatter of this package is a different procedure with less traffic.
"""

from __future__ import annotations

from typing import Literal

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.arithmetic.trees import broadcast_rounds, num_rounds, reduce_rounds
from offbeat.codec.arithmetic import S, SparseArithmetic
from offbeat.codec.tally import Tally
from offbeat.collectives.base import Exchanged
from offbeat.transport.operations import Collective, Payload, Recv, Send


def gtopk_tree(
    rank: int,
    world_size: int,
    mine: S,
    tally: Tally,
    k: int,
    wire: SparseArithmetic[S],
    *,
    variant: Literal["conserving", "paper"] = "conserving",
) -> Collective[Exchanged[S]]:
    """At most k entries that approximate the k largest of the sum.

    Args:
        rank: as of `SparseCollective`.
        world_size: likewise.
        mine: likewise.
        tally: likewise.
        k: likewise.
        wire: likewise.
        variant: "conserving", or "paper": puts entries back as published.
    """
    sum_so_far = mine
    left_over: list[S] = []  # added up at the end, when nobody waits for this rank any more
    for peer, sends in reduce_rounds(rank, world_size):
        if sends:
            payload, rounding = wire.encode(sum_so_far, tally)
            left_over.append(rounding)
            yield Send(peer, payload)
        else:
            theirs, their_tally = wire.decode((yield Recv(peer)))
            sum_so_far, dropped = wire.keep_largest(wire.add(sum_so_far, theirs), k)
            left_over.append(dropped)
            tally = tally.merge(their_tally)
    message: Payload = b""
    if rank == 0:
        message, rounding = wire.encode(sum_so_far, tally)
        left_over.append(rounding)
    message = yield from broadcast(rank, world_size, message)
    kept, tally = wire.decode(message)
    owed = wire.split_common(mine, kept)[1] if variant == "paper" else wire.add_all(left_over)
    return Exchanged(kept=kept, owed=owed, tally=tally)


def broadcast(rank: int, world_size: int, message: Payload) -> Collective[Payload]:
    """Rank 0's `message` on every rank, by a binomial tree."""
    for peer, sends in broadcast_rounds(rank, world_size):
        if sends:
            yield Send(peer, message)
        else:
            message = yield Recv(peer)
    return message


def cost_s(*, world_size: int, k: int, pair_bytes: float, network: NetworkCosts) -> float:
    """2 log2(P) alpha + 2 k log2(P) beta: each round of both phases passes one message of k pairs,
    which is read.

    Args:
        world_size: P, >= 1.
        k: how many pairs each rank contributes.
        pair_bytes: of one pair in a message.
        network: what messages cost.
    """
    rounds = 2 * num_rounds(world_size)
    on_links_s = network.messages.time_s(num_messages=rounds, num_bytes=rounds * k * pair_bytes)
    return on_links_s + network.entries_s(k, read_again=rounds - 1)
