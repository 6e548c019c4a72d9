"""Methods that follow each other in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from offbeat_lab.plan.simulation import Method, Setting, Simulated


class FirstSteps(Method):
    """One method in the first steps of a run, and another one from then on.

    Args:
        num_steps: that are the first ones, >= 0.
        first: what they do.
        then: what the others do.
    """

    def __init__(self, num_steps: int, *, first: Method, then: Method) -> None:
        self.steps_in_a_period = then.steps_in_a_period
        self.extra_bytes = max(then.extra_bytes, first.extra_bytes if num_steps else 0.0)
        self._num_steps = num_steps
        self._first = first
        self._then = then

    @override
    def simulate(self, setting: Setting) -> Simulated:
        return simulate_phases(self._phases(setting))

    @override
    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        phases = self._phases(setting)
        return _mean(phases, [method.waiting_s(where, encode_s) for method, where in phases])

    def _phases(self, setting: Setting) -> list[tuple[Method, Setting]]:
        """The methods of the steps that are predicted, with their steps."""
        steps = setting.steps
        if steps is None:
            return [(self._then, setting)]
        first, then = (
            range(steps.start, min(steps.stop, self._num_steps)),
            range(max(steps.start, self._num_steps), steps.stop),
        )
        return [
            (method, replace(setting, steps=some))
            for method, some in ((self._first, first), (self._then, then))
            if some
        ]


def simulate_phases(phases: Sequence[tuple[Method, Setting]]) -> Simulated:
    """The mean step of a run that is one method after the other, each with the steps it does."""
    parts = [method.simulate(where) for method, where in phases]
    if len(parts) == 1:
        return parts[0]
    numbers = ("step_s", "bytes_per_step", "encode_s", "alpha_share")
    return Simulated(
        **{name: _mean(phases, [getattr(part, name) for part in parts]) for name in numbers},
        by_events=all(part.by_events for part in parts),
        note=parts[-1].note,
        is_lower_limit=parts[-1].is_lower_limit,
        kept_bytes=max(part.kept_bytes for part in parts),
    )


def _mean(phases: Sequence[tuple[Method, Setting]], values: Sequence[float]) -> float:
    weights = [len(where.steps or (None,)) for _, where in phases]
    return float(np.average(values, weights=weights))
