"""Steps of strategies that average beside training: WAGMA, AD-PSGD and eager SGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from offbeat_lab.plan.methods.strategy_steps import LEAST_TENSORS, StrategySteps
from offbeat_lab.plan.simulation import FEW_WORKERS, Setting, Simulated

_LEAST_STEPS: Final = 20
"""Averages of slow links take several steps to come."""

_STEPS_OF_AN_AVERAGE: Final = 10
"""Averages that take more look faster than they are."""


class BackgroundSteps(StrategySteps):
    """Steps of `strategy`. Of many workers some are simulated, since each of their messages is."""

    least_steps = _LEAST_STEPS
    most_tensors = LEAST_TENSORS  # nothing is sent before the last gradient is there

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, extra_bytes=4.0)
        if self.steps_in_a_period > _LEAST_STEPS:
            self.steps_in_a_period = 1  # what is done so seldom hardly counts

    @override
    def simulate(self, setting: Setting) -> Simulated:
        notes, simulated_on = [], setting
        if setting.world_size > FEW_WORKERS:
            notes.append(f"what it adds to computing is that of {FEW_WORKERS} workers")
            simulated_on = replace(setting, cluster=setting.cluster.left_with(FEW_WORKERS))
        by_events = not notes
        simulated = super().simulate(simulated_on)
        step_s = simulated.step_s + setting.ideal_s - simulated_on.ideal_s
        average_s = setting.network.messages.time_s(
            num_messages=2, num_bytes=setting.profile.num_bytes
        )
        num_steps = average_s / setting.ideal_s
        is_slow = (
            setting.world_size > 1
            and num_steps > max(self.steps_in_a_period, _STEPS_OF_AN_AVERAGE)
            and step_s < average_s  # or else each step waits for its average
        )
        if is_slow:
            notes.append(
                f"an average takes about {num_steps:.0f} steps on the slowest link here, so its"
                " step is a lower limit: later steps wait for averages. It is recommended only"
                " where nothing else is planned for"
            )
        return replace(
            simulated,
            step_s=step_s,
            by_events=by_events,
            note="; ".join(notes),
            is_lower_limit=is_slow,
        )
