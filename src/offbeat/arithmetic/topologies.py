"""Graphs for gossip averaging: with which neighbours, and with which weights, a rank averages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def ring_weights(rank: int, world_size: int) -> dict[int, float]:
    """The row of `rank` in the mixing matrix of a ring: the weight of each rank it averages with,
    including itself.

    The two neighbours and the rank itself have equal weights. The matrix is therefore symmetric and
    doubly stochastic, and averaging does not change the mean over ranks.

    >>> ring_weights(0, 2), ring_weights(0, 1)
    ({0: 0.5, 1: 0.5}, {0: 1.0})
    """
    members = dict.fromkeys((rank, (rank - 1) % world_size, (rank + 1) % world_size))
    return dict.fromkeys(members, 1 / len(members))


def random_partner(rank: int, world_size: int, *, seed: int, round_number: int) -> int:
    """The rank that `rank` meets in a round in which ranks are paired at random; itself, where
    their number is odd and it is left over.

    >>> [random_partner(rank, 5, seed=0, round_number=1) for rank in range(5)]
    [3, 4, 2, 0, 1]
    """
    # A generator of its own for each round, so that the choice depends on nothing else.
    order = np.random.default_rng([seed, round_number]).permutation(world_size).tolist()
    place = order.index(rank) ^ 1
    return int(order[place]) if place < world_size else rank


class GossipPeers(NamedTuple):
    """The neighbours of one rank in a round of a directed graph.

    Attributes:
        targets: the ranks that it sends to.
        sources: the ranks that it receives from.
    """

    targets: tuple[int, ...]
    sources: tuple[int, ...]


def exponential_hops(world_size: int, out_degree: int) -> list[int]:
    """The distances, in ranks, between sender and receiver in a directed exponential graph.

    The distances are in the order in which rounds use them: first the powers of two below
    `world_size`. Where `out_degree`, 1 <= out_degree < world_size, is larger than their number, all
    other distances follow.

    >>> exponential_hops(6, 1), exponential_hops(6, 4)
    ([1, 2, 4], [1, 2, 4, 3, 5])
    """
    hops = [1 << j for j in range((world_size - 1).bit_length())]
    if out_degree > len(hops):
        hops += [hop for hop in range(1, world_size) if hop not in hops]
    return hops


def exponential_peers(
    rank: int, world_size: int, round_number: int, *, out_degree: int
) -> GossipPeers:
    """The neighbours of `rank` in a round of the directed exponential graph (arXiv 1811.10792,
    appendix A).

    Each round takes the next `out_degree` distances in turn. With one target a round, a rank sends
    to the ranks at distances 1, 2, 4, ... in ceil(log2(world_size)) rounds; where the number of
    ranks is a power of two, these rounds average exactly. A world of one has no neighbours.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: the number of ranks, >= 1.
        round_number: the number of the round, >= 0, the same on every rank.
        out_degree: the number of targets in a round, 1 <= out_degree < world_size.

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
