"""Measures every pair of workers by itself, so that one slow link or one slow host shows.

In each of P - 1 rounds every worker has one partner (a round-robin tournament), so that no two
pairs share a worker. One sends and the other one sends back; the round trip is timed at one end,
since the two may come to a round at different times. The fastest of a few repeats counts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from offbeat.arithmetic.costs import LinkCost
from offbeat.gradients.collective_choice import fit_cost
from offbeat.transport.operations import AllGather, Collective, Now, Recv, Send

SMALL_BYTES: Final = 64
LARGE_BYTES: Final = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""The larger message is the first whose bytes take as long as its latency: of fewer they are lost
in it.
"""
_REPORT = struct.Struct("<2I2d")
_OVER = b"."
_REPEATS = 3
_SLOW = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLink:
    """What a message between two ranks costs."""

    first: int
    second: int
    cost: LinkCost


def partner(rank: int, world_size: int, round_: int) -> int | None:
    """Whom `rank` meets in round 0 <= `round_` < num_rounds(world_size); None when it sits out.

    The last of an even number of places stays; the other ranks move round it. In an odd world
    that place is vacant.
    """
    last = world_size - 1 + world_size % 2
    if rank == last:
        other = round_ * ((last + 1) // 2) % last  # the one whose partner would be itself
    else:
        other = (round_ - rank) % last
        other = last if other == rank else other
    return other if other < world_size else None


def num_rounds(world_size: int) -> int:
    """How many rounds it takes until every worker has met every other."""
    return world_size - 1 + world_size % 2 if world_size > 1 else 0


def measure_pairs(rank: int, world_size: int) -> Collective[list[PairLink]]:
    """Every pair once, in order; the same list on every rank. 3 MiB each way for each pair, more
    where links are long.
    """
    mine: list[bytes] = []
    for round_ in range(num_rounds(world_size)):
        peer = partner(rank, world_size, round_)
        if peer is None:
            continue
        if peer < rank:
            yield from _send_back(peer)
        else:
            cost = yield from _cost(peer)
            mine.append(_REPORT.pack(rank, peer, cost.alpha_s, cost.beta_s_per_byte))
    reports = yield AllGather(b"".join(mine))
    measured = sorted(values for report in reports for values in _REPORT.iter_unpack(report))
    return [
        PairLink(first=first, second=second, cost=LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta))
        for first, second, alpha_s, beta in measured
    ]


def slow_workers(pairs: Sequence[PairLink], world_size: int) -> list[int]:
    """Workers whose best link is slow against what most workers' best ones do; of two nobody can
    tell which it is.
    """
    if world_size < 3:
        return []
    best = [
        min(link.cost.beta_s_per_byte for link in pairs if rank in (link.first, link.second))
        for rank in range(world_size)
    ]
    return [rank for rank, beta in enumerate(best) if beta > _SLOW * median_low(best)]


def _cost(peer: int) -> Collective[LinkCost]:
    """The line through the fastest round trips of both sizes; the small one may have been
    disturbed, but bytes are not free.
    """
    small_s = yield from _fastest_s(peer, SMALL_BYTES)
    for num_bytes in LARGE_BYTES:
        large_s = yield from _fastest_s(peer, num_bytes)
        if large_s >= 2 * small_s:
            break
    yield Send(peer, _OVER)
    return fit_cost(small_s, large_s, SMALL_BYTES, num_bytes)


def _fastest_s(peer: int, num_bytes: int) -> Collective[float]:
    durations_s: list[float] = []
    for _ in range(_REPEATS):
        begin_s = yield Now()
        yield Send(peer, bytes(num_bytes))
        yield Recv(peer)
        durations_s.append(((yield Now()) - begin_s) / 2)
    return min(durations_s)


def _send_back(peer: int) -> Collective[None]:
    while len(message := (yield Recv(peer))) > len(_OVER):
        yield Send(peer, message)
