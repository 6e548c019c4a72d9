"""Binomial trees over any number of ranks."""

from __future__ import annotations


def reduce_rounds(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Rank `rank`'s part in a binomial reduction to rank 0: (peer, whether this rank sends) for
    each of its rounds.

    In round j the ranks that are odd multiples of 2**j send to the rank 2**j below and are done. A
    rank without a partner sits the round out, so any world size works in ceil(log2(world_size))
    rounds.

    >>> reduce_rounds(2, 5), reduce_rounds(4, 5)
    ([(3, False), (0, True)], [(0, True)])
    """
    rounds: list[tuple[int, bool]] = []
    distance = 1
    while distance < world_size:
        if rank % (2 * distance):
            return [*rounds, (rank - distance, True)]
        if rank + distance < world_size:
            rounds.append((rank + distance, False))
        distance *= 2
    return rounds


def broadcast_rounds(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Rank `rank`'s part in a binomial broadcast from rank 0: the reduction backwards, sending and
    receiving swapped.
    """
    return [(peer, not sends) for peer, sends in reversed(reduce_rounds(rank, world_size))]


def num_rounds(world_size: int) -> int:
    """ceil(log2(world_size)).

    >>> [num_rounds(p) for p in (1, 2, 3, 4, 5, 17)]
    [0, 1, 2, 2, 3, 5]
    """
    return (world_size - 1).bit_length()
