"""Rotating groups: who averages with whom in which version, for any number of members and any group
size.

Any ceil(log_S P) + 1 consecutive versions connect everyone with everyone; where both numbers are
powers of two, ceil(log_S P) do. Every member computes the same groups from the same arguments, so
nothing has to be agreed upon.

With powers of two this is the butterfly of WAGMA-SGD (arXiv 2005.00124, algorithm 1). **Difference
from the paper:** its mask accumulates over the phases, which contradicts the paper's own example: P
= 8, S = 4, t = 1 should give {0, 1, 4, 5} and {2, 3, 6, 7} and gives groups of two as printed. Here
version t joins those who agree in all bits of their position but `{(t g + r) mod n : r = 0 ..
g-1}`, with g = log2 S and n = log2 P.

Any other case deals members like cards: they stand in a row that is cut into groups; for the next
version everyone's first goes first, then everyone's second, and so on, and the row is cut again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Who averages in a version, and whom they wait for.

    Attributes:
        group: the ranks, in the same order everywhere.
        min_fresh: how many of them have to arrive (at this version or a later one) before the
            others are made to contribute what they have. 1: nobody waits for anybody; len(group):
            all wait for all.
    """

    group: tuple[int, ...]
    min_fresh: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_fresh <= len(self.group):
            raise ConfigError(
                f"min_fresh is {self.min_fresh}, allowed is 1 to {len(self.group)}, the size of the"
                " group"
            )


def meeting(
    version: int,
    rank: int,
    members: Sequence[int],
    *,
    group_size: int,
    period: int | None = None,
    quorum: float = 0.75,
) -> Meeting:
    """Where `rank` averages in `version`: in its group, or with everyone in every `period`-th
    version.

    Args:
        version: which version, >= 0.
        rank: one of `members`.
        members: as for `groups`.
        group_size: as for `groups`.
        period: everyone meets in versions period - 1, 2 period - 1, ...; None: never.
        quorum: the fraction of all members that has to arrive when everyone meets, rounded down to
            one or more, in (0, 1].

    >>> meeting(1, 5, range(8), group_size=4, period=3)
    Meeting(group=(0, 1, 4, 5), min_fresh=1)
    >>> meeting(2, 5, range(8), group_size=4, period=3)
    Meeting(group=(0, 1, 2, 3, 4, 5, 6, 7), min_fresh=6)
    """
    if period is not None and period < 1:
        raise ConfigError(f"period is {period}, allowed is 1 or more, or None for never")
    if not 0 < quorum <= 1:
        raise ConfigError(
            f"quorum is {quorum}, allowed is above 0 and up to 1, the fraction of members that has"
            " to arrive"
        )
    if period is not None and (version + 1) % period == 0:
        _check(version, members, group_size)
        return Meeting(
            group=tuple(members), min_fresh=max(1, math.floor(quorum * len(members) + 1e-9))
        )
    mine = next((group for group in groups(version, members, group_size) if rank in group), None)
    if mine is None:
        raise ConfigError(f"rank {rank} is no member; members are {list(members)}")
    return Meeting(group=mine)


def groups(version: int, members: Sequence[int], group_size: int) -> list[tuple[int, ...]]:
    """The groups of one version: disjoint, covering, of nearly equal size, each in the order of
    `members`.

    Args:
        version: which version, >= 0.
        members: the ranks that take part, all different, in the same order everywhere; at least
            one.
        group_size: S, 2 or more; more than there are members means one group of all. No group is
            larger and none is of one alone; where that cannot be (S = 2, an odd number of members)
            one group has three.

    Returns:
        The groups, in an order that says nothing.

    Raises:
        ConfigError: an argument is out of range.

    >>> groups(1, range(8), 4)
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    >>> groups(0, [3, 4, 6, 8, 9], 2), groups(1, [3, 4, 6, 8, 9], 2)
    ([(3, 4, 6), (8, 9)], [(3, 4, 8), (6, 9)])
    """
    _check(version, members, group_size)
    groups_of_positions = _dealt(len(members), min(group_size, len(members)), version)
    return [tuple(members[position] for position in group) for group in groups_of_positions]


def default_group_size(num_members: int) -> int:
    """About the square root of `num_members`, 2 or more; a power of two among as many, so that
    groups are a butterfly's.

    >>> [default_group_size(num_members) for num_members in (1, 2, 4, 5, 8, 16, 17, 64)]
    [2, 2, 2, 3, 4, 4, 5, 8]
    """
    if _is_power_of_two(num_members):
        return max(2, 1 << (num_members.bit_length() // 2))
    return max(2, math.ceil(math.sqrt(num_members)))


def num_groups(num_members: int, group_size: int) -> int:
    """Into how many groups `num_members` are divided.

    >>> num_groups(16, 4), num_groups(17, 4), num_groups(5, 2), num_groups(1, 2)
    (4, 5, 2, 1)
    """
    return max(1, min(-(-num_members // group_size), num_members // 2))


def _check(version: int, members: Sequence[int], group_size: int) -> None:
    if version < 0:
        raise ConfigError(f"version is {version}, allowed is 0 or more")
    if not members:
        raise ConfigError("there are no members; a rank that averages is a member itself")
    if len(set(members)) != len(members):
        raise ConfigError(f"members are {list(members)}, allowed is each rank once")
    if group_size < 2:
        raise ConfigError(
            f"group_size is {group_size}, allowed is 2 or more; to average with nobody, use another"
            " strategy"
        )


@lru_cache(maxsize=64)
def _dealt(num_members: int, group_size: int, version: int) -> tuple[tuple[int, ...], ...]:
    """Groups of positions, each sorted."""
    if _is_power_of_two(num_members) and _is_power_of_two(group_size) and group_size > 1:
        rows = _butterfly(num_members, group_size, version)
    else:
        count = num_groups(num_members, group_size)
        rows = np.array_split(_power(_deal(num_members, count), version), count)
    return tuple(tuple(np.sort(row).tolist()) for row in rows)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _butterfly(num_members: int, group_size: int, version: int) -> list[NDArray[np.int64]]:
    num_bits, bits_per_version = num_members.bit_length() - 1, group_size.bit_length() - 1
    free_bits = [
        (version * bits_per_version + phase) % num_bits for phase in range(bits_per_version)
    ]
    fixed = ~np.int64(sum(1 << bit for bit in free_bits))
    positions = np.arange(num_members)
    in_order_of_groups = positions[np.argsort(positions & fixed, kind="stable")]
    return list(in_order_of_groups.reshape(-1, group_size))


def _deal(num_members: int, count: int) -> NDArray[np.int64]:
    """The permutation that stands one version's row anew for the next: whose place each place takes
    over.
    """
    rows = np.array_split(np.arange(num_members), count)
    places_in_row = np.concatenate([np.arange(len(row)) for row in rows])
    return np.argsort(places_in_row, kind="stable")


def _power(permutation: NDArray[np.int64], exponent: int) -> NDArray[np.int64]:
    """`permutation` applied `exponent` times."""
    result = np.arange(len(permutation))
    while exponent:
        if exponent & 1:
            result = result[permutation]
        permutation = permutation[permutation]
        exponent >>= 1
    return result
