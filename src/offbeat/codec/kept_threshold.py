"""A threshold that is kept for a period ("threshold kept for a period" of DCT, arXiv 2010.08899,
section 3).

    t = the k-th largest magnitude of residual + weight * gradient         every 1,000 steps
    what reaches t travels

What is not sent is owed and adds up until it reaches t, so that the number of entries settles by
itself; it follows the size of gradients, where selectors that hold to k follow their order alone.

Differences from the paper:
- where fewer than k / 4 or more than 4 k entries reach the threshold, the k largest are taken, and
  a period begins;
- a period is one of a bucket's own, which is checkpointed.

Cost per selection: one pass, as of re-using a threshold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from typing_extensions import override

from offbeat.codec.selectors import THRESHOLD, Memory, Selection, Selector, reuse

_AGE: Final = "age"
_WITHIN: Final = (0.25, 4.0)


class KeptThreshold(Selector):
    """What reaches a threshold that is sought anew every 1,000 steps, if that is k / 4 to 4 k
    entries; else the `k` largest.
    """

    def __init__(self, period: int = 1000) -> None:
        self.period = period

    @override
    def initial_state(self) -> Memory:
        return {THRESHOLD: 0.0, _AGE: 0.0}

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        kept = state[THRESHOLD] if state[_AGE] < self.period else 0.0
        found = reuse(flat, residual, k=k, weight=weight, threshold=kept, within=_WITHIN)
        if not found.finite:
            return found
        # Reaching adapts a threshold that has fitted, but not where exactly k entries reach it; one
        # that is sought is the least of k.
        sought = kept == 0 or (len(found.sparse) == k and found.state[THRESHOLD] != kept)
        threshold, age = (found.state[THRESHOLD], 0.0) if sought else (kept, state[_AGE])
        return replace(found, state={THRESHOLD: threshold, _AGE: age + 1})
