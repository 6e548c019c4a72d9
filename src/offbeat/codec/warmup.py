"""Density warm-up: early gradients change fast, so the first epochs send more of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Densities of the first stages of training.

    Args:
        densities: one for each stage, in (0, 1].
        steps_each: steps of a stage, >= 1.
    """

    densities: tuple[float, ...]
    steps_each: int

    def density_at(self, step: int, target: float) -> float:
        """Density of step `step`, counted from 0: the stage's, but never below `target`, which
        holds after the last stage.

        >>> Warmup(densities=(0.5, 0.1), steps_each=10).density_at(12, 0.001)
        0.1
        """
        stage = step // self.steps_each
        return max(self.densities[stage], target) if stage < len(self.densities) else target

    @classmethod
    def paper(cls, steps_per_epoch: int) -> Warmup:
        """Of gTop-k S-SGD (arXiv 1901.04359): four epochs."""
        return cls(densities=(0.25, 0.0725, 0.015, 0.004), steps_each=steps_per_epoch)

    @classmethod
    def exponential(cls, steps_per_epoch: int, density: float, epochs: int = 4) -> Warmup:
        """Of DGC (arXiv 1712.01887): from epoch to epoch by the same factor, down to `density` in
        epoch `epochs`.
        """
        return cls(
            densities=tuple(density ** ((epoch + 1) / (epochs + 1)) for epoch in range(epochs)),
            steps_each=steps_per_epoch,
        )
