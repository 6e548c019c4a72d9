"""A period of averages that follows how far replicas move apart (Adaptive Periodic Averaging, arXiv
2007.06134).

    at each average    S = mean over ranks of ||x_mean - x_i||^2
    at first           C = running mean of S / learning rate
    then               period += 1 where S < .7 lr C, and -= 1 where S > 1.3 lr C

Replicas part as fast as the learning rate and the noise of gradients let them, so periods are short
early and grow as the learning rate falls.

Difference from the paper: C is the mean of a number of averages, and not of a quarter of the run,
whose length is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from offbeat.averaging.periodic import AveragingSchedule, Drift


class AdaptivePeriod(AveragingSchedule):
    """A period that begins with 4 steps, and from the 26th average on grows where replicas are
    nearer to each other than before, and shrinks where they are further apart.

    Args:
        first: the period at first, in steps, >= 1.
        num_measured: of how many averages the usual drift is the mean, >= 1.
    """

    measures_drift = True

    def __init__(self, *, first: int = 4, num_measured: int = 25) -> None:
        self.first, self.num_measured = first, num_measured

    @override
    def initial_state(self) -> Mapping[str, float]:
        return {"period": self.first, "averages": 0, "drift_by_lr": 0.0}

    @override
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        return int(state["period"])

    @override
    def after_average(self, state: Mapping[str, float], drift: Drift) -> Mapping[str, float]:
        period, averages, usual = state["period"], state["averages"], state["drift_by_lr"]
        if not drift.lr:
            return state  # nothing has moved, which says nothing of later
        if averages < self.num_measured:
            usual += (drift.squared / drift.lr - usual) / (averages + 1)
        elif drift.squared < 0.7 * drift.lr * usual:
            period += 1
        elif drift.squared > 1.3 * drift.lr * usual:
            period = max(1, period - 1)
        return {"period": period, "averages": averages + 1, "drift_by_lr": usual}
