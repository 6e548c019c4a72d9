"""What waiting alone costs: how far ranks get under each rule of who waits for whom, if
communication takes no time at all.

Every rule takes `durations_s`, shape (steps, ranks): how long each rank computes, or is late, in
each of its steps. It says how much of its time each rank spends so. No method that follows the rule
gets further, whatever its network is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOutcome:
    """One mega-batch.

    Attributes:
        updates: batches of each worker.
        samples: of each worker; they sum to the size of the mega-batch.
        finished_s: when each worker had nothing left to do, in seconds since the beginning.
    """

    updates: tuple[int, ...]
    samples: tuple[int, ...]
    finished_s: tuple[float, ...]

    @property
    def duration_s(self) -> float:
        return max(self.finished_s)

    @property
    def waiting(self) -> float:
        """The fraction of all workers' time that was spent waiting for the last one.

        >>> DispatchOutcome(updates=(1, 1), samples=(4, 4), finished_s=(1.0, 2.0)).waiting
        0.25
        """
        return 1 - sum(self.finished_s) / (len(self.finished_s) * self.duration_s)


def dispatch(
    batch_sizes: Sequence[int], num_samples: int, duration_s: Callable[[int, int], float]
) -> DispatchOutcome:
    """Deal `num_samples` out, batch by batch, to whoever is free first; among equals to the lowest
    rank.

    Args:
        batch_sizes: by worker, >= 1.
        num_samples: of the mega-batch, >= 1.
        duration_s: seconds > 0 that worker `rank` needs for so many samples.

    >>> dispatch([10, 10], 60, lambda rank, samples: samples / (20, 10)[rank])
    DispatchOutcome(updates=(4, 2), samples=(40, 20), finished_s=(2.0, 2.0))
    """
    updates, samples = [0] * len(batch_sizes), [0] * len(batch_sizes)
    finished_s = [0.0] * len(batch_sizes)
    free = [(0.0, rank) for rank in range(len(batch_sizes))]
    left = num_samples
    while left:
        now_s, rank = free[0]
        claimed = min(batch_sizes[rank], left)
        left -= claimed
        updates[rank] += 1
        samples[rank] += claimed
        finished_s[rank] = now_s + duration_s(rank, claimed)
        heapq.heapreplace(free, (finished_s[rank], rank))
    return DispatchOutcome(
        updates=tuple(updates), samples=tuple(samples), finished_s=tuple(finished_s)
    )


def gain(speeds: Sequence[float]) -> float:
    """How many times more samples a second workers get through at the sum of their speeds than in
    equal batches, in lock-step.

    >>> gain([1, 1, 0.5, 0.5]), gain([2, 1])
    (1.5, 1.5)
    """
    return sum(speeds) / (len(speeds) * min(speeds))
