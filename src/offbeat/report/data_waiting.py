"""Who is late: what the steps of a contestant's runs say, in figures and in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.report.data import Floats, RunResults
from offbeat.report.style import SECONDS, write

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

    mean_s: Floats
    last_share: Floats
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

    def sentence(self) -> str:
        """Names the slow worker, or says that there is none."""
        if self.together:
            return (
                f"Workers come together: the last one {write(self.spread_s, SECONDS)} after the"
                " first on average."
            )
        slow = self.slow_worker
        if slow is not None:
            share, behind_s = float(self.last_share[slow]), float(self.mean_s[slow])
            return (
                f"Worker {slow} was last in {share:.0%} of steps, {write(behind_s, SECONDS)} behind"
                " the first on average."
            )
        return (
            "No single worker is the slow one: none was last in more than"
            f" {self.last_share.max():.0%} of steps. The last one came"
            f" {write(self.spread_s, SECONDS)} after the first on average."
        )


def lateness(runs: Sequence[RunResults]) -> Lateness | None:
    """What `runs` say about lateness; None where no step had two workers that exchanged
    something.
    """
    late = [run.steps.settled().lateness_s() for run in runs if run.steps.num_ranks > 1]
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
            np.mean([run.steps.settled().step_s().mean() for run in runs if run.steps.num_steps])
        ),
    )
