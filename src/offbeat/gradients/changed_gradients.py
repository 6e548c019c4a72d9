"""Whether the loop changes gradients between `backward()` and `step()`, as
`torch.nn.utils.clip_grad_norm_` does.

What a sparse strategy leaves in `param.grad` is no plain gradient where it has taken over Adam's
scaling: whoever clips it clips something else than was meant. Where the scaling is taken over
without a look, nothing is learned (`tests/outside/test_schedules.py`, AdamW, clipped).

A change in place shows in the version that autograd keeps of each tensor, at no cost. What is done
to `param.grad.data` does not, so now and then the norm is compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import ExchangeCounts
from offbeat.torch_private import version_of

NORM_INTERVAL: Final = 10
"""Norms are compared in the first so many steps, and once in so many steps afterwards. One takes a
pass over the gradient after the exchange, and another one before the step.
"""


class ChangedGradients(Callback):
    """Remembers what the exchange has left in the buckets. It stands behind it in the order of
    callbacks.

    Args:
        buckets: of the exchange.
        counts: of the exchange.
        when_changed: is called before a step whose gradients were changed.
    """

    state_key: ClassVar[str] = "changed_gradients"
    may_begin_anew: ClassVar[bool] = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        counts: ExchangeCounts,
        when_changed: Callable[[], None],
    ) -> None:
        self._buckets = buckets
        self._counts = counts
        self._when_changed = when_changed
        self._num_steps = 0
        self._num_exchanges = 0  # when gradients were looked at last
        self._versions: list[int] | None = None  # since the last step; None: not looked at
        self._norms: list[float] = []
        self._is_changed = False

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """A pass that accumulates nothing moves gradients away and back, which is no change. What
        was changed before it is remembered, since `_look` takes what it finds for unchanged.
        """
        self._is_changed |= self._versions is not None and self._differ()

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self._look()

    @override
    def on_backward_failed(self) -> None:
        self._versions = None

    @override
    def on_join(self) -> None:
        self._look()

    @override
    def on_before_step(self) -> None:
        if self._num_exchanges != self._counts.exchanges:  # it has joined its peers' just now
            self._look()

    @override
    def on_before_update(self) -> None:
        if self._versions is not None and (self._is_changed or self._differ()):
            self._when_changed()

    @override
    def clip_as_loop_does(self, max_norm: float) -> float | None:
        """What the exchange, which comes before this part, has just done is not the loop's."""
        self._look()
        return None

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        self._versions, self._is_changed = None, False

    def _look(self) -> None:
        if self._num_exchanges != self._counts.exchanges:
            self._num_exchanges, self._is_changed = self._counts.exchanges, False
        self._versions = self._versions_now()
        looks = self._num_steps < NORM_INTERVAL or self._num_steps % NORM_INTERVAL == 0
        self._norms = self._norms_now() if looks else []

    def _differ(self) -> bool:
        return (
            self._versions != self._versions_now()
            or any(map(_holds_others, self._buckets))
            or bool(self._norms and not all(map(_is_same, self._norms, self._norms_now())))
        )

    def _versions_now(self) -> list[int]:
        return [version_of(bucket.flat) for bucket in self._buckets]

    def _norms_now(self) -> list[float]:
        return [
            float(
                torch.linalg.vector_norm(
                    bucket.flat, dtype=torch.promote_types(bucket.flat.dtype, torch.float32)
                )
            )
            for bucket in self._buckets
        ]


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
