"""Density warm-up: early gradients change fast, so the first steps send more of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_STAGE: Final = re.compile(r"(?P<density>[0-9.eE-]+)x(?P<steps>[0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """Densities of the first stages of training.

    Args:
        stages: of each the density, in (0, 1], and for how many steps, >= 1.
    """

    stages: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("there is no stage")
        for density, steps in self.stages:
            if not (0 < density <= 1 and steps >= 1):
                raise ValueError(f"a stage has density {density!r} for {steps!r} steps")

    def density_at(self, step: int, target: float) -> float:
        """Density of step `step`, counted from 0: the stage's, but never below `target`, which
        holds after the last stage.

        >>> Warmup(stages=((0.5, 10), (0.1, 20))).density_at(12, 0.001)
        0.1
        """
        end = 0
        for density, steps in self.stages:
            end += steps
            if step < end:
                return max(density, target)
        return target

    @classmethod
    def of(cls, pairs: Iterable[Iterable[float]]) -> Warmup:
        """Of pairs of a density and a number of steps. Raises `TypeError` or `ValueError` where
        they are something else.
        """
        stages = []
        for density, steps in pairs:
            if not math.isfinite(steps) or int(steps) != steps:
                raise ValueError(f"{steps!r} is no number of steps")
            stages.append((float(density), int(steps)))
        return cls(stages=tuple(stages))

    @classmethod
    def read(cls, text: str) -> Warmup:
        """Of text such as "1.0x80+0.25x40": 80 steps at density 1, then 40 at 0.25. Raises
        `ValueError` where it is something else.
        """
        stages = [_STAGE.fullmatch(stage.strip()) for stage in text.split("+")]
        return cls.of(
            (float(stage["density"]), int(stage["steps"])) if stage else (0.0, 0)
            for stage in stages
        )

    @classmethod
    def paper(cls, steps_per_epoch: int) -> Warmup:
        """Of gTop-k S-SGD (arXiv 1901.04359): four epochs."""
        return cls(stages=tuple((d, steps_per_epoch) for d in (0.25, 0.0725, 0.015, 0.004)))

    @classmethod
    def exponential(cls, steps_per_epoch: int, density: float, epochs: int = 4) -> Warmup:
        """Of DGC (arXiv 1712.01887): from epoch to epoch by the same factor, down to `density` in
        epoch `epochs`.
        """
        powers = ((epoch + 1) / (epochs + 1) for epoch in range(epochs))
        return cls(stages=tuple((density**power, steps_per_epoch) for power in powers))
