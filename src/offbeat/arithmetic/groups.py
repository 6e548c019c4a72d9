"""Rotating groups: which ranks average together in a version, for any number of ranks P and any
group size S.

In any ceil(log_S P) + 1 consecutive versions every rank is connected with every other one; where
both numbers are powers of two, ceil(log_S P) versions suffice. Every member computes the same
groups from the same arguments, so that no message is needed to agree on them.

The members form a sequence that is cut into groups. The sequence of the next version has first the
first member of every group, then the second member of every group, and so on; it is cut into groups
again.

With powers of two this turns the bits of a position by g = log2 S, and is the butterfly of
WAGMA-SGD (arXiv 2005.00124, algorithm 1): a group of version t consists of the ranks whose
positions agree in all bits except `{(t g + r) mod n : r = 0 .. g-1}`, with n = log2 P.
**Difference from the paper:** the mask of the printed algorithm accumulates over the phases, which
contradicts the paper's own example: P = 8, S = 4, t = 1 should give {0, 1, 4, 5} and {2, 3, 6, 7},
and gives groups of two as printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionGroup:
    """The ranks that average together in a version, and how many of them must arrive first.

    Attributes:
        ranks: the members of the group, in the same order at all of them.
        min_arrivals: how many of them have to arrive (at this version or a later one) before the
            other members are made to contribute their last snapshots. With 1 no rank waits for
            another; with len(ranks) all wait for all.
        catch_up: the version at which, or at a later one, every member has to have arrived before
            a trainer that has come to this version goes on; below 0: there is none yet. None:
            nobody waits for that.
    """

    ranks: tuple[int, ...]
    min_arrivals: int = 1
    catch_up: int | None = None

    @property
    def is_global(self) -> bool:
        """Whether this is a global synchronization, for which members wait for each other."""
        return self.catch_up is not None or self.min_arrivals > 1


def group_of_version(
    version: int,
    rank: int,
    members: Sequence[int],
    *,
    group_size: int,
    period: int | None = None,
    quorum: float = 0.75,
    max_ahead: int | None = None,
) -> VersionGroup:
    """The group with which `rank` averages in `version`.

    In every `period`-th version this is a global synchronization: the group of all members.

    Args:
        version: the number of the version, >= 0.
        rank: one of `members`.
        members, group_size: the arguments of `groups`.
        period: the versions period - 1, 2 period - 1, ... are global; None: none is.
        quorum: the fraction of all members that has to arrive at a global synchronization, in
            (0, 1]; the number of members is rounded down, to at least one.
        max_ahead: how many versions may pass within one step of a member, >= `period`; None: any
            number. At a global synchronization members wait for those that have not arrived since
            the one that lies `max_ahead`, less a period, before. It is rounded down to whole
            periods.

    >>> group_of_version(1, 5, range(8), group_size=4, period=3)
    VersionGroup(ranks=(0, 1, 4, 5), min_arrivals=1, catch_up=None)
    >>> group_of_version(2, 5, range(8), group_size=4, period=3)
    VersionGroup(ranks=(0, 1, 2, 3, 4, 5, 6, 7), min_arrivals=6, catch_up=None)
    >>> group_of_version(8, 5, range(8), group_size=4, period=3, max_ahead=6).catch_up
    5
    """
    if period is not None and (version + 1) % period == 0:
        min_arrivals = size_of_quorum(quorum, len(members))
        # A member that is late at a global synchronization has ended a step since the one before,
        # or it would have been late there. So the versions that may still pass are fewer by one
        # period.
        catch_up = None if max_ahead is None else version - (max_ahead // period - 1) * period
        return VersionGroup(ranks=tuple(members), min_arrivals=min_arrivals, catch_up=catch_up)
    (mine,) = (group for group in groups(version, members, group_size) if rank in group)
    return VersionGroup(ranks=mine)


def size_of_quorum(quorum: float, num_members: int) -> int:
    """The fraction `quorum`, in (0, 1], of `num_members`, rounded down, but at least one.

    >>> [size_of_quorum(0.75, num_members) for num_members in (1, 2, 3, 4, 8)]
    [1, 1, 2, 3, 6]
    """
    # 1e-9: the quorum of 0.3 of 10 members is 3, although 0.3 * 10 may be rounded to 2.999...
    return max(1, math.floor(quorum * num_members + 1e-9))


def groups(version: int, members: Sequence[int], group_size: int) -> list[tuple[int, ...]]:
    """The groups of one version.

    They are disjoint, contain all members, and have nearly equal sizes. Each is in the order of
    `members`.

    Args:
        version: the number of the version, >= 0.
        members: the ranks that take part, all different, in the same order everywhere; at least
            one.
        group_size: S, 2 or more; a number above that of members means one group of all. No group
            is larger and none has a single member, except that one group has three members where S
            is 2 and the number of members is odd.

    Returns:
        The groups, in no particular order.

    >>> groups(1, range(8), 4)
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    >>> groups(0, [3, 4, 6, 8, 9], 2), groups(1, [3, 4, 6, 8, 9], 2)
    ([(3, 4, 6), (8, 9)], [(3, 4, 8), (6, 9)])
    """
    groups_of_positions = _groups_of_positions(len(members), min(group_size, len(members)), version)
    return [tuple(members[position] for position in group) for group in groups_of_positions]


def default_group_size(num_members: int) -> int:
    """About the square root of `num_members`, at least 2.

    Where `num_members` is a power of two the result is one too, so that groups form a butterfly.

    >>> [default_group_size(num_members) for num_members in (1, 2, 4, 5, 8, 16, 17, 64)]
    [2, 2, 2, 3, 4, 4, 5, 8]
    """
    if num_members & (num_members - 1) == 0:
        return max(2, 1 << (num_members.bit_length() // 2))
    return max(2, math.ceil(math.sqrt(num_members)))


def num_groups(num_members: int, group_size: int) -> int:
    """The number of groups into which `num_members` are divided.

    >>> num_groups(16, 4), num_groups(17, 4), num_groups(5, 2), num_groups(1, 2)
    (4, 5, 2, 1)
    """
    return max(1, min(-(-num_members // group_size), num_members // 2))


@lru_cache(maxsize=64)
def _groups_of_positions(
    num_members: int, group_size: int, version: int
) -> tuple[tuple[int, ...], ...]:
    """The groups of `version`, as sorted positions in the list of members."""
    count = num_groups(num_members, group_size)
    found = np.array_split(_power(_next_sequence(num_members, count), version), count)
    return tuple(tuple(np.sort(group).tolist()) for group in found)


def _next_sequence(num_members: int, count: int) -> NDArray[np.int64]:
    """The permutation from the sequence of one version to that of the next: entry i is the index
    of the member that comes to index i.
    """
    cut = np.array_split(np.arange(num_members), count)
    index_in_group = np.concatenate([np.arange(len(group)) for group in cut])
    return np.argsort(index_in_group, kind="stable")


def _power(permutation: NDArray[np.int64], exponent: int) -> NDArray[np.int64]:
    """`permutation` applied `exponent` times."""
    result = np.arange(len(permutation))
    while exponent:
        if exponent & 1:
            result = result[permutation]
        permutation = permutation[permutation]
        exponent >>= 1
    return result
