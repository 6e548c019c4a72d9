"""Who averages with whom, and with which weights, when nobody averages with everybody."""

from __future__ import annotations

from typing import NamedTuple


def ring_weights(rank: int, world_size: int) -> dict[int, float]:
    """Rank `rank`'s row of the ring's mixing matrix: the weight of each rank it averages with,
    itself included.

    Neighbours and the rank itself count the same, so the matrix is symmetric and doubly stochastic:
        the mean over ranks stays
    what it is.

    >>> ring_weights(0, 2), ring_weights(0, 1)
    ({0: 0.5, 1: 0.5}, {0: 1.0})
    """
    members = dict.fromkeys((rank, (rank - 1) % world_size, (rank + 1) % world_size))
    return dict.fromkeys(members, 1 / len(members))


class GossipPeers(NamedTuple):
    """One rank's part in a round of a directed graph.

    Attributes:
        targets: the ranks it sends to.
        sources: the ranks it hears from.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]


def exponential_hops(world_size: int, out_degree: int) -> list[int]:
    """The distances that messages of a directed exponential graph travel, in the order in which
    rounds use them.

    These are the powers of two below `world_size`. Where `out_degree`, 1 <= out_degree <
    world_size, asks for more of them than there are, the other distances follow.

    >>> exponential_hops(6, 1), exponential_hops(6, 4)
    ([1, 2, 4], [1, 2, 4, 3, 5])
    """
    hops = [1 << j for j in range((world_size - 1).bit_length())]
    if out_degree > len(hops):
        hops += [hop for hop in range(1, world_size) if hop not in hops]
    return hops


def exponential_peers(
    rank: int, world_size: int, *, round_number: int, out_degree: int
) -> GossipPeers:
    """Whom rank `rank` sends to and hears from in a round of the directed exponential graph (arXiv
    1811.10792, appendix A).

    Each round takes the next `out_degree` hops in turn, so one peer a round reaches the ranks 1, 2,
    4, ... further on, in ceil(log2(world_size)) rounds. With a power of two ranks that averages
    exactly. A world of one has no peers.

    >>> exponential_peers(0, 4, round_number=1, out_degree=1)
    GossipPeers(targets=(2,), sources=(2,))
    """
    if world_size == 1:
        return GossipPeers((), ())
    hops = exponential_hops(world_size, out_degree)
    begin = round_number * out_degree
    taken = [hops[(begin + j) % len(hops)] for j in range(out_degree)]
    return GossipPeers(
        tuple((rank + hop) % world_size for hop in taken),
        tuple((rank - hop) % world_size for hop in taken),
    )
