"""SIDCo: a threshold that is fitted, and not sought (arXiv 2101.10761, section 2, algorithm 1).

    a = |residual + weight * gradient|;  d = k / n
    threshold = -mean(a) ln d                                    (one stage: a is exponential)
    with M stages: the first at 1/4, and each further one fits what exceeds the last threshold, at
    (4 d)^(1 / (M - 1))
    every 5 steps: another M where fewer than 0.8 k or more than 1.2 k reached the thresholds

Differences from the paper:
- the next M is M + 1, and after the largest, log2(1 / d), again 1. The paper takes M - 1 where too
  many reach the threshold, but under heavy tails one stage lets too many through, and two fit;
- where fewer than 0.8 k or more than 1.2 k entries reach the threshold, the k largest are taken:
  on normally distributed gradients one stage reaches 2% of k at a density of 0.01;
- each bucket has a number of stages of its own, which is checkpointed; the published code shares it
  between all tensors;
- of the three distributions that the paper fits, the exponential one only, which it recommends.

Cost per selection: three passes and another for each further stage over what is left, beside those
of re-using a threshold. Twice the time of exact selection on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from typing_extensions import override

from offbeat.codec.selectors import Memory, Selection, Selector, reuse

_FIRST: Final = 0.25
_STEPS: Final = 5  # between changes of the number of stages
_SLACK: Final = 0.2


class SIDCo(Selector):
    """What reaches a threshold fitted to the distribution, if that is 0.8 k to 1.2 k entries; else
    the `k` largest.
    """

    @override
    def initial_state(self) -> Memory:
        return {"stages": 1.0, "steps": 0.0, "reached": 0.0}

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        magnitudes = torch.add(residual, flat, alpha=weight).abs_()
        density = k / flat.numel() if flat.numel() else 1.0
        threshold = fitted_threshold(magnitudes, density, num_stages=int(state["stages"]))
        num_reached = int((magnitudes >= threshold).sum())
        selection = reuse(flat, residual, k=k, weight=weight, threshold=threshold)
        return replace(selection, state=_next(state, num_reached / max(1, k), density))


def fitted_threshold(magnitudes: torch.Tensor, density: float, *, num_stages: int) -> float:
    """The magnitude that a fraction `density` of `magnitudes` reaches, if they are exponentially
    distributed beyond the threshold of each stage.

    Args:
        magnitudes: shape (n,), not negative.
        density: in (0, 1].
        num_stages: >= 1.
    """
    threshold = 0.0
    for stage in range(num_stages):
        if num_stages == 1:
            share = density
        else:
            share = _FIRST if stage == 0 else (density / _FIRST) ** (1 / (num_stages - 1))
        if not magnitudes.numel():
            break
        threshold -= (float(magnitudes.mean()) - threshold) * math.log(share)
        magnitudes = magnitudes[magnitudes > threshold]
    return threshold


def _next(state: Memory, reached: float, density: float) -> Memory:
    """The state after a step in which `reached` times k entries reached the threshold."""
    stages, steps, total = state["stages"], state["steps"] + 1, state["reached"] + reached
    if steps < _STEPS:
        return {"stages": stages, "steps": steps, "reached": total}
    if abs(total / steps - 1) > _SLACK:
        stages = stages + 1 if stages < math.log2(1 / density) else 1.0
    return {"stages": stages, "steps": 0.0, "reached": 0.0}
