"""What waiting alone costs: how far ranks get under each rule of who waits for whom, if
communication takes no time at all.

Every rule takes `durations_s`, shape (steps, ranks): how long each rank computes, or is late, in
each of its steps. It says how much of its time each rank spends so. No method that follows the rule
gets further, whatever its network is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Durations = NDArray[np.float64]
"""Seconds, shape (steps, ranks)."""

_SAME_S = 1e-9
"""Sums in another order differ by less."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Utilisation:
    """How ranks spent their time.

    Attributes:
        worked_s: in steps, shape (ranks,).
        elapsed_s: from the beginning to the end of each rank's last step, waiting included, shape
            (ranks,).
    """

    worked_s: NDArray[np.float64]
    elapsed_s: NDArray[np.float64]

    @property
    def by_rank(self) -> NDArray[np.float64]:
        """Each rank's speed as a fraction of its own without waiting, shape (ranks,)."""
        return self.worked_s / self.elapsed_s

    @property
    def mean(self) -> float:
        """The mean step without waiting over the mean step, over all ranks and steps."""
        return float(self.worked_s.sum() / self.elapsed_s.sum())


def periodic(durations_s: Durations, *, period: int, quorum: int | None = None) -> Utilisation:
    """All ranks average after every `period` of their own steps.

    Args:
        durations_s: of steps; those after the last average do not count.
        period: 1 <= period <= steps. 1: every step is synchronous.
        quorum: how many have to arrive before an average goes on, 1 <= quorum <= ranks; None: all.
            A rank that arrives later than that finds it over.

    >>> durations_s = np.array([[1.0, 2.0], [2.0, 1.0]])
    >>> periodic(durations_s, period=1).mean, periodic(durations_s, period=2).mean
    (0.75, 1.0)
    """
    num_steps, num_ranks = durations_s.shape
    legs_s = durations_s[: num_steps // period * period].reshape(-1, period, num_ranks).sum(axis=1)
    clock_s = np.zeros(num_ranks)
    for leg_s in legs_s:
        clock_s = _released(clock_s + leg_s, quorum)
    return Utilisation(worked_s=legs_s.sum(axis=0), elapsed_s=clock_s)


def on_first_call(durations_s: Durations, *, period: int, quorum: int | None = None) -> Utilisation:
    """All ranks average as soon as one of them has done `period` steps since the last average; its
    peers finish their step.

    So ranks do unequal numbers of steps between averages, and nobody waits for longer than a step.

    Args:
        durations_s: of steps. It ends when one rank has too few left for another average.
        period: 1 <= period <= steps.
        quorum: as for `periodic`.

    >>> on_first_call(np.array([[1.0, 3.0]] * 6), period=3).mean
    1.0
    """
    num_steps, num_ranks = durations_s.shape
    ends_s = np.vstack(
        [np.zeros(num_ranks), durations_s.cumsum(axis=0)]
    )  # of steps, on a clock that stops when its rank waits
    ranks, done, waited_s = np.arange(num_ranks), np.zeros(num_ranks, np.int64), np.zeros(num_ranks)
    while done.max() + period <= num_steps:
        called_at_s = (ends_s[done + period, ranks] + waited_s).min()
        under_way = [
            np.searchsorted(ends_s[:, r], called_at_s - waited_s[r] - _SAME_S) for r in ranks
        ]
        # A rank that was late for the last average may be in time for this one.
        arrived = np.maximum(under_way, done)
        if arrived.max() > num_steps:
            break
        arrivals_s = ends_s[arrived, ranks] + waited_s
        waited_s = waited_s + _released(arrivals_s, quorum) - arrivals_s
        done = arrived
    worked_s = ends_s[done, ranks]
    return Utilisation(worked_s=worked_s, elapsed_s=worked_s + waited_s)


def with_neighbours(
    durations_s: Durations, waits_for: Callable[[int], NDArray[np.intp]]
) -> Utilisation:
    """After each step, ranks wait until some of their peers have done the same step.

    Args:
        durations_s: of steps.
        waits_for: by number of the step, from 0: the ranks that each rank waits for, shape (ranks,
            any number).
    """
    ranks = np.arange(durations_s.shape[1])
    clock_s = np.zeros(ranks.size)
    for step, duration_s in enumerate(durations_s):
        arrivals_s = clock_s + duration_s
        clock_s = arrivals_s[np.column_stack([ranks, waits_for(step)])].max(axis=1)
    return Utilisation(worked_s=durations_s.sum(axis=0), elapsed_s=clock_s)


def _released(arrivals_s: NDArray[np.float64], quorum: int | None) -> NDArray[np.float64]:
    """When each rank leaves an average that goes on as soon as `quorum` of them have arrived."""
    enough = arrivals_s.size if quorum is None else quorum
    return arrivals_s.clip(min=float(np.sort(arrivals_s)[enough - 1]))
