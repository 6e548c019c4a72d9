"""Whether a loop changes gradients between `backward()` and `step()`, as clipping does, where they
are not what they seem to be.
"""

from __future__ import annotations

import math
from typing import Final

from offbeat.gradients.buckets import Bucket
from offbeat.gradients.clipping import norms_of
from offbeat.gradients.exchange import ExchangeCounts
from offbeat.torch_private import version_of

NORM_INTERVAL: Final = 10
"""Norms are compared in the first so many steps, and once in so many steps afterwards. One takes a
pass over the gradient after the exchange, and another one before the step.
"""


class GradientWatch:
    """Whether the loop changes gradients between `backward()` and `step()`.

    What is left in `param.grad` is no plain gradient where Adam's scaling has been taken over:
    whoever clips it clips something else than was meant. Where the scaling is taken over without a
    look, nothing is learned (`tests/outside/test_schedules.py`, AdamW, clipped).

    A change in place shows in the version that autograd keeps of each tensor, at no cost. What is
    done to `param.grad.data` does not, so now and then the norm is compared, too.

    Args:
        counts: of the exchange.
        compares_norms: whether norms are compared, too.

    Attributes:
        buckets: of the exchange.
    """

    def __init__(self, counts: ExchangeCounts, *, compares_norms: bool = True) -> None:
        self.buckets: list[Bucket] = []
        self._counts, self._compares_norms = counts, compares_norms
        self._num_steps = 0
        self._num_exchanges = 0  # when gradients were looked at last
        self._versions: list[int] | None = None  # since the last step; None: not looked at
        self._norms: list[float] = []
        self._is_changed = False

    def look(self) -> None:
        """What gradients are now the exchange has made them."""
        if self._num_exchanges != self._counts.exchanges:
            self._num_exchanges, self._is_changed = self._counts.exchanges, False
        self._versions = self._versions_now()
        looks = self._num_steps < NORM_INTERVAL or self._num_steps % NORM_INTERVAL == 0
        self._norms = self._norms_now() if looks and self._compares_norms else []

    def look_if_new(self) -> None:
        """The same, if there was an exchange since the last look."""
        if self._num_exchanges != self._counts.exchanges:
            self.look()

    def compare(self) -> bool:
        """Whether somebody has changed them since then, in this step."""
        self._is_changed |= self._versions is not None and self._differ()
        return self._is_changed

    def forget(self) -> None:
        """There are no gradients."""
        self._versions, self._is_changed = None, False

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        self._num_steps += 1
        self.forget()

    def _differ(self) -> bool:
        return (
            self._versions != self._versions_now()
            or any(map(_holds_others, self.buckets))
            or bool(self._norms and not all(map(_is_same, self._norms, self._norms_now())))
        )

    def _versions_now(self) -> list[int]:
        return [version_of(bucket.flat) for bucket in self.buckets]

    def _norms_now(self) -> list[float]:
        return norms_of(bucket.flat for bucket in self.buckets)


def _holds_others(bucket: Bucket) -> bool:
    """Whether a gradient is not in its place of the bucket."""
    return any(
        (gradient := parameter.grad) is not None
        and gradient is not view
        and not bucket.holds(position, gradient)
        for position, (parameter, view) in enumerate(
            zip(bucket.parameters, bucket.views, strict=True)
        )
    )


def _is_same(before: float, now: float) -> bool:
    """Sums are rounded in another order where the number of threads changes."""
    return math.isclose(before, now, rel_tol=1e-4) or not math.isfinite(before)
