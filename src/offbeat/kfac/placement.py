"""Which rank inverts which Kronecker factor.

    D-KFAC     Every rank inverts every factor; nothing is sent.
    MPD-KFAC   Factor i is inverted by rank i mod P and broadcast.
    SPD-KFAC   A factor that is cheaper to invert than to broadcast is inverted by every rank. The
               other factors, largest first, each go to the rank with the least load so far, which
               inverts and broadcasts them.

The load of a factor is the time of its inversion. SPD-KFAC: arXiv 2107.06533.

**Differences from the paper:** it compares each factor's inversion with its broadcast alone
(`place_by_rule`). That is right only if broadcasts are sent in sequence: where their latencies
overlap, or broadcasts travel while the next factor is being inverted, one factor more costs next to
nothing to send. `place_for_shortest_phase` therefore predicts the whole phase, for every size up to
which factors may be inverted by all, and takes the best, to within `SAME_LENGTH_FACTOR` of it: so
it is about as good, as predicted, as D-KFAC, MPD-KFAC and the paper's rule, or better. The released
code does neither: it compares d with a constant.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.errors import ConfigError
from offbeat.kfac.factors import num_packed
from offbeat.kfac.overlap import fuse_for_earliest_end

Owner: TypeAlias = int | None

SAME_LENGTH_FACTOR = 1.03
"""No prediction is so good that phases which differ by less than this factor can be told apart."""

BYTES_PER_ELEMENT = 4
"""Inverses travel as float32."""


def packed_bytes(dim: int) -> int:
    """Of an inverse of `dim` rows."""
    return BYTES_PER_ELEMENT * num_packed(dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class InverseCosts:
    """What inverting and broadcasting cost.

    Attributes:
        inversion: of a factor, on one rank.
        broadcast: from any rank to all.
        pipelined: whether an inverse is sent while its owner goes on with the next factor. False:
            broadcasts begin when every rank has inverted all it has to.
        fused: whether inverses of one owner may share a message (`fused_messages`). False: one
            message each.
    """

    inversion: InversionCost
    broadcast: Channel
    pipelined: bool = True
    fused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementTime:
    """How long it takes until every rank has every inverse.

    Attributes:
        computing_s: until the last rank has inverted all it has to.
        exposed_s: from then until the last broadcast has arrived, >= 0.
    """

    computing_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.computing_s + self.exposed_s


def by_every_rank(num_factors: int) -> tuple[Owner, ...]:
    """D-KFAC: every rank inverts each.

    >>> by_every_rank(2)
    (None, None)
    """
    return (None,) * num_factors


def round_robin(num_factors: int, world_size: int) -> tuple[Owner, ...]:
    """MPD-KFAC: dealt out one by one.

    >>> round_robin(3, 2)
    (0, 1, 0)
    """
    return tuple(index % world_size for index in range(num_factors))


def least_loaded(loads: Sequence[float], world_size: int) -> tuple[int, ...]:
    """Largest load first, each to the rank with the least so far; among equals to the lowest rank.

    The largest sum is at most 4/3 - 1/(3 P) of the least possible one, and at most the mean plus (1
    - 1/P) of the largest load.

    >>> least_loaded([3, 1, 2, 2], 2)
    (0, 0, 1, 1)
    """
    owners = [0] * len(loads)
    ranks = [(0.0, rank) for rank in range(world_size)]
    for index in largest_first(loads):
        load, rank = ranks[0]
        owners[index] = rank
        heapq.heapreplace(ranks, (load + loads[index], rank))
    return tuple(owners)


def largest_first(loads: Sequence[float]) -> list[int]:
    """Indices by descending load, among equals ascending: the order in which a rank inverts what it
    owns.

    >>> largest_first([1, 3, 3])
    [1, 2, 0]
    """
    return sorted(range(len(loads)), key=lambda index: -loads[index])


def place_by_rule(dims: Sequence[int], world_size: int, costs: InverseCosts) -> tuple[Owner, ...]:
    """SPD-KFAC as published: by every rank where t_inv(d) < t_bcast(d), the others by the least
    loaded.

    Args:
        dims: rows of each factor, >= 1.
        world_size: number of ranks, >= 1.
        costs: what is compared.
    """
    broadcast = costs.broadcast.link
    shared = [
        costs.inversion.time_s(dim) < broadcast.time_s(num_messages=1, num_bytes=packed_bytes(dim))
        or world_size == 1
        for dim in dims
    ]
    return _assigned(world_size, shared, _times_s(dims, costs))


def place_for_shortest_phase(
    dims: Sequence[int],
    world_size: int,
    costs: InverseCosts,
) -> tuple[Owner, ...]:
    """SPD-KFAC's placement with about the shortest predicted phase.

    Tried are: all factors of up to d rows inverted by every rank, for each d there is; none
    inverted by every rank; `place_by_rule`; and `round_robin`. With one rank there is nobody to
    send to. Of those that are about as short as the shortest (`SAME_LENGTH_FACTOR`) the one with
    the least inverting is taken, and among equals the one with the fewest broadcasts.

    Args:
        dims: rows of each factor, >= 1.
        world_size: number of ranks, >= 1.
        costs: what inverting and broadcasting cost.
    """
    if world_size == 1:
        return by_every_rank(len(dims))
    times_s = _times_s(dims, costs)
    candidates = [
        round_robin(len(dims), world_size),
        place_by_rule(dims, world_size, costs),
        *(
            _assigned(world_size, [dim <= limit for dim in dims], times_s)
            for limit in sorted({0, *dims}, reverse=True)
        ),
    ]

    phases = {owners: placement_time(owners, dims, world_size, costs) for owners in candidates}
    limit_s = SAME_LENGTH_FACTOR * min(phase.total_s for phase in phases.values())

    def cost(owners: tuple[Owner, ...]) -> tuple[float, float, int]:
        phase = phases[owners]
        return phase.computing_s, phase.total_s, sum(owner is not None for owner in owners)

    return min((owners for owners, phase in phases.items() if phase.total_s <= limit_s), key=cost)


def placement_time(
    owners: Sequence[Owner], dims: Sequence[int], world_size: int, costs: InverseCosts
) -> PlacementTime:
    """How long a placement is expected to take.

    Each rank inverts what it owns first, largest first, and then what every rank inverts, so that
    broadcasts travel as early as they can.

    Args:
        owners: who inverts each factor; None: every rank.
        dims: rows of each factor, >= 1.
        world_size: number of ranks, >= 1.
        costs: what inverting and broadcasting cost.
    """
    times_s = _times_s(dims, costs)
    of_owner: dict[Owner, list[int]] = {}
    for index in largest_first(times_s):
        of_owner.setdefault(owners[index], []).append(index)
    by_all_s = sum(times_s[index] for index in of_owner.pop(None, []))
    inverted: list[tuple[float, int]] = []
    for own in of_owner.values():
        messages = fused_messages([dims[index] for index in own], world_size, costs)
        done_s = accumulate(sum(times_s[own[place]] for place in message) for message in messages)
        sizes = (sum(packed_bytes(dims[own[place]]) for place in message) for message in messages)
        inverted += zip(done_s, sizes, strict=True)
    computing_s = max((done_s for done_s, _ in inverted), default=0.0) + by_all_s
    if not costs.pipelined:
        inverted = [(computing_s, num_bytes) for _, num_bytes in inverted]
    arrived_s = costs.broadcast.last_arrival_s(inverted) if world_size > 1 else 0.0
    return PlacementTime(computing_s=computing_s, exposed_s=max(0.0, arrived_s - computing_s))


def fused_messages(dims: Sequence[int], world_size: int, costs: InverseCosts) -> list[list[int]]:
    """Which inverses of one owner share a message: those with which the last arrives as early as
    possible.

    All owners send at once, so each message waits for one of every other owner. If not
    `costs.fused`, no two share one.

    Args:
        dims: rows of the owner's factors, in the order in which it inverts them.
        world_size: number of ranks, >= 1.
        costs: of inverting and of broadcasting.

    Returns:
        Places in `dims` by message, in the order in which they are sent.
    """
    if not costs.fused:
        return [[place] for place in range(len(dims))]
    ready_s = list(accumulate(costs.inversion.time_s(dim) for dim in dims))
    link, gap_s = costs.broadcast.link, costs.broadcast.gap_s
    shared = LinkCost(alpha_s=world_size * gap_s, beta_s_per_byte=world_size * link.beta_s_per_byte)
    return fuse_for_earliest_end(ready_s, list(map(packed_bytes, dims)), shared)


def _times_s(dims: Sequence[int], costs: InverseCosts) -> list[float]:
    return [costs.inversion.time_s(dim) for dim in dims]


def _assigned(world_size: int, shared: Sequence[bool], loads: Sequence[float]) -> tuple[Owner, ...]:
    """`shared` factors to every rank, the others by the least loaded."""
    sent = [load for load, is_shared in zip(loads, shared, strict=True) if not is_shared]
    owners = iter(least_loaded(sent, world_size))
    return tuple(None if is_shared else next(owners) for is_shared in shared)


class InversionCost(Protocol):
    """Seconds as a function of the number of rows."""

    def time_s(self, dim: int) -> float:
        """How long the inversion of a matrix of shape (dim, dim) takes, dim >= 1."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TabledInversion:
    """What was measured, straight lines in the logarithms between, cubes above the largest size.

    Attributes:
        dims: rows, ascending, at least one.
        seconds: of each, > 0.
    """

    dims: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.dims or any(a >= b for a, b in pairwise(self.dims)) or self.dims[0] < 1:
            raise ConfigError(
                f"dims of the table are {self.dims}, allowed are one or more sizes from 1,"
                " ascending"
            )
        if len(self.seconds) != len(self.dims) or not all(
            0 < seconds < math.inf for seconds in self.seconds
        ):
            raise ConfigError(
                f"seconds of the table are {self.seconds}, allowed is one positive number a size"
            )

    def time_s(self, dim: int) -> float:
        """As measured; below the smallest size as long as it takes.

        >>> TabledInversion(dims=(10, 1000), seconds=(1.0, 100.0)).time_s(100)
        10.0
        """
        above = bisect_right(self.dims, dim)
        if above == 0:
            return self.seconds[0]
        if above == len(self.dims):
            return self.seconds[-1] * math.pow(dim / self.dims[-1], 3)
        low, high = self.dims[above - 1 : above + 1]
        low_s, high_s = self.seconds[above - 1 : above + 1]
        part = math.log(dim / low) / math.log(high / low)
        return low_s * math.pow(high_s / low_s, part)


def slowest(samples_of_ranks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """What ranks that measured (rows -> seconds) agree on once each has everyone's: each size at
    the slowest rank's time.

    A rank that fits this has the same costs as all others, whatever it measured itself, and
    everybody waits for the slowest.

    >>> slowest([{64: 1.0, 128: 2.0}, {128: 3.0}])
    {64: 1.0, 128: 3.0}
    """
    agreed: dict[int, float] = {}
    for samples in samples_of_ranks:
        for dim, seconds in samples.items():
            agreed[dim] = max(seconds, agreed.get(dim, 0.0))
    return dict(sorted(agreed.items()))
