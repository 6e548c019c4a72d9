"""What a mega-batch comes to when whoever is free takes the next batch: updates, samples and
waiting, by arithmetic.

    every worker claims b_i samples; whoever has finished claims the next b_i, or what is left
    when nothing is left and all have finished, they merge

This predicts what a cluster described by its speeds will do, and is the ceiling that measurements
are held against.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
