"""Options that change with the step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """A number that changes with the step, for options that take a function of the step.

    It is a function of the step and of nothing else, so that all ranks, and a resumed run, get the
    same. Before the first point it has the first value, after the last point the last one.

    Args:
        points: steps with the values that begin there, steps ascending from 0 or more, such as
            ((0, 0.03), (1000, 0.01)).
        between: what lies between two points: "hold" the earlier value, or go to the later one in
            a "linear" way, or by equal factors, "geometric".

    Raises:
        ConfigError: there is no point, steps do not ascend, a value is not finite, or one that a
            geometric way passes is not greater than 0.

    >>> damping = Schedule(((0, 0.04), (100, 0.01)), between="geometric")
    >>> damping(0), damping(50), damping(1000)
    (0.04, 0.02, 0.01)
    """

    points: tuple[tuple[int, float], ...]
    between: Literal["hold", "linear", "geometric"] = "hold"

    def __post_init__(self) -> None:
        steps, values = [step for step, _ in self.points], [value for _, value in self.points]
        if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
            raise ConfigError(
                "a Schedule takes points of ascending steps, such as ((0, 0.03), (1000, 0.01)), got"
                f" {self.points!r}"
            )
        if self.between not in ("hold", "linear", "geometric"):
            raise ConfigError(
                f"between must be 'hold', 'linear' or 'geometric', got {self.between!r}"
            )
        lowest = 0.0 if self.between == "geometric" else -math.inf
        if not all(math.isfinite(value) and value > lowest for value in values):
            also = " greater than 0" if self.between == "geometric" else ""
            raise ConfigError(f"the values of a Schedule must be finite{also}, got {values!r}")

    def __call__(self, step: int) -> float:
        """The value at `step`, counted from 0."""
        place = bisect_right([at for at, _ in self.points], step) - 1
        if place < 0:
            return self.points[0][1]
        begin, value = self.points[place]
        if self.between == "hold" or place + 1 == len(self.points):
            return value
        end, later = self.points[place + 1]
        part = (step - begin) / (end - begin)
        if self.between == "linear":
            return value + part * (later - value)
        return float(value * (later / value) ** part)
