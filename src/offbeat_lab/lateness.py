"""Who is late, and whether one worker is the slow one: the one rule for it. Findings, the page and
the bars in it all ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat_lab.breakdown import Steps

_TOGETHER = 0.02
"""Arrivals nearer to each other than this part of a step are called together."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lateness:
    """How late workers were, over all runs of a contestant, the first steps left out.

    Attributes:
        mean_s: shape (workers,), mean time after the first one.
        last_share: shape (workers,), share of the steps in which this worker was the last one.
        spread_s: mean time from the first worker to the last.
        step_s: mean duration of a step.
    """

    mean_s: NDArray[np.float64]
    last_share: NDArray[np.float64]
    spread_s: float
    step_s: float

    @property
    def slow_worker(self) -> int | None:
        """The worker that is last in most steps, if there is one and its peers notice it."""
        slowest = int(np.argmax(self.last_share))
        mostly = self.last_share[slowest] >= max(0.5, 1.5 / len(self.mean_s))
        return slowest if mostly and not self.together else None

    @property
    def together(self) -> bool:
        """Whether all workers come at the same time, as far as a step's length goes."""
        return self.spread_s < _TOGETHER * self.step_s


def slow_worker_of(named: Iterable[int | None]) -> int | None:
    """The slow worker of several contestants on one cluster: the one that is slow under at least
    half of them, of several such the lowest.

    Args:
        named: the slow worker, or None, under each contestant whose workers wait for each other.
    """
    of_each = list(named)
    votes = Counter(worker for worker in of_each if worker is not None)
    often = [worker for worker, count in votes.items() if 2 * count >= len(of_each)]
    return min(often, default=None)


def lateness(runs: Sequence[Steps]) -> Lateness | None:
    """What the steps of `runs` say about lateness; None where no step had two workers that
    exchanged something.
    """
    late = [steps.settled().lateness_s() for steps in runs if steps.num_ranks > 1]
    late = [values[:, ~np.isnan(values).any(axis=0)] for values in late]
    late = [values for values in late if values.size]
    if not late or len({len(values) for values in late}) > 1:
        return None
    together = np.concatenate(late, axis=1)
    last = np.bincount(together.argmax(axis=0), minlength=len(together))
    return Lateness(
        mean_s=together.mean(axis=1),
        last_share=last / together.shape[1],
        spread_s=float(together.max(axis=0).mean()),
        step_s=float(
            np.mean([steps.settled().step_s().mean() for steps in runs if steps.num_steps])
        ),
    )
