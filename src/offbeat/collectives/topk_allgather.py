"""Top-k by all-gather: every rank sees every contribution.

Two readings of the sum. Top-k S-SGD applies all of it, up to P k entries. The global top-k keeps
its k largest; since each rank has seen everything, each knows which of its own entries were left
out and owes exactly those.

In a sum of many ranks' changes of weights one that has gone astray weighs as much as it is long.
`clipped_sum` shortens every contribution to the median length of all; what that takes away is lost.

Cost per step: ceil(log2 P) messages, (P-1) k pairs sent by each rank: linear in P, good for few
ranks only.
"""

from __future__ import annotations

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.arithmetic.trees import num_rounds
from offbeat.codec.arithmetic import S, SparseArithmetic
from offbeat.codec.tally import Tally
from offbeat.collectives.base import Exchanged
from offbeat.collectives.gather import gather_entries
from offbeat.transport.operations import Collective


def topk_sum(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    """The sum of all contributions, with up to P k entries (Top-k S-SGD).

    Args:
        rank: as of `SparseCollective`.
        world_size: likewise.
        mine: likewise.
        tally: likewise.
        k: likewise.
        wire: likewise.
    """
    contributions, rounding, tally = yield from gather_entries(rank, world_size, mine, tally, wire)
    return Exchanged(kept=wire.add_all(contributions), owed=rounding, tally=tally)


def clipped_sum(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    """The sum of all contributions, none of them longer than the median of their norms.

    Args:
        rank: as of `SparseCollective`.
        world_size: likewise.
        mine: likewise.
        tally: likewise.
        k: likewise.
        wire: likewise.
    """
    contributions, rounding, tally = yield from gather_entries(rank, world_size, mine, tally, wire)
    total = wire.add_all(wire.clip_to_median(contributions))
    return Exchanged(kept=total, owed=rounding, tally=tally)


def global_topk(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    """The exact k largest entries of the sum of all contributions.

    Args:
        rank: as of `SparseCollective`.
        world_size: likewise.
        mine: likewise.
        tally: likewise.
        k: likewise.
        wire: likewise.
    """
    contributions, rounding, tally = yield from gather_entries(rank, world_size, mine, tally, wire)
    kept, _ = wire.keep_largest(wire.add_all(contributions), k)
    # Rounding is owed wherever it happened; of the rest only what the selection left out.
    _, left_out = wire.split_common(mine, kept)
    inside, _ = wire.split_common(rounding, kept)
    return Exchanged(kept=kept, owed=wire.add(left_out, inside), tally=tally)


def cost_s(*, world_size: int, k: int, pair_bytes: float, network: NetworkCosts) -> float:
    """log2(P) alpha + (P-1) k beta, and k entries that are read P-1 times.

    Args:
        world_size: P, >= 1.
        k: how many pairs each rank contributes.
        pair_bytes: of one pair in a message.
        network: what messages cost.
    """
    on_links_s = network.messages.time_s(
        num_messages=num_rounds(world_size), num_bytes=(world_size - 1) * k * pair_bytes
    )
    return on_links_s + network.entries_s(k, read_again=world_size - 2)
