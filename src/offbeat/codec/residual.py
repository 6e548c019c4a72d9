"""Error feedback for one flat bucket: what is not sent is owed, and added to the next gradient.

    acc = residual + weight * gradient                  (written into the gradient's buffer)
    send the k largest of acc; what is left is the new residual
    add what other parts dropped or rounded off

A step is staged first and committed when it is known to be good everywhere, or discarded without a
trace. Staging copies nothing: residual and gradient trade buffers on commit.

Memory beside the gradient: one buffer of its size. Half-precision gradients are owed in float32;
their buffer cannot be traded, so that takes two float32 buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.device_copies import on_device
from offbeat.codec.jit import kernel
from offbeat.codec.selectors import Selection, Selector
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import is_finite


class ErrorFeedback:
    """Residual and selection of one bucket.

    After `stage` or `stage_all` comes the `commit` of the same name, or `discard`.

    Args:
        num_elements: elements of the bucket, n.
        dtype: of its gradients: float32 or float64, or bfloat16 or float16, whose state is kept in
            float32.
        device: of its gradients.
        selector: picks what is sent.
        decay: what is owed is multiplied by it when a step is committed, in (0, 1].

    Attributes:
        residual: what is owed, shape (n,). Live: writes change the state; another buffer after each
            commit.
        selector_state: what the selector has remembered; a checkpoint may replace values in it.
    """

    def __init__(
        self,
        num_elements: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        selector: Selector,
        decay: float = 1.0,
    ) -> None:
        self.selector_state = dict(selector.initial_state())
        self._new_selector_state: Mapping[str, float] = self.selector_state
        self._selector = selector
        self._decay = decay
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._is_half = dtype != state_dtype

        self.residual, self._accumulator = (
            torch.zeros(num_elements if wanted else 0, dtype=state_dtype, device=device)
            for wanted in (True, self._is_half)
        )
        self._gradient: torch.Tensor | None = None  # the caller's buffer, while a step is staged

    def stage(
        self,
        flat: torch.Tensor,
        k: int,
        *,
        weight: float = 1.0,
        gradient: torch.Tensor | None = None,
    ) -> Selection:
        """Pick what to send.

        Args:
            flat: the gradient, shape (n,). Float32 and float64 buffers hold acc minus what was
                picked afterwards, and will be traded for the residual's; half-precision ones stay
                the caller's.
            k: how many entries, >= 1.
            weight: of the gradient.
            gradient: in float32, what `flat` has in half precision; None: `flat`.
        """
        accumulated = self._begin(flat, gradient)
        selection = self._selector.select(
            accumulated,
            self.residual,
            k=min(k, accumulated.numel()),
            weight=weight,
            state=self.selector_state,
        )
        self._new_selector_state = selection.state
        return selection

    def stage_all(
        self, flat: torch.Tensor, *, weight: float = 1.0, gradient: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Leave all of acc in `flat`, to be sent densely. Returns whether it is finite, as
        `is_finite` does. Only what rounding to half precision loses will be owed.

        Args:
            flat: see `stage`.
            weight: see `stage`.
            gradient: see `stage`.
        """
        accumulated = self._begin(flat, gradient)
        torch.add(self.residual, accumulated, alpha=weight, out=accumulated)
        if self._is_half:
            flat.copy_(accumulated)
            accumulated.sub_(flat)
        return is_finite(flat)

    def commit(self, owed: Sparse) -> torch.Tensor:
        """What was left by `stage` becomes the residual, and `owed` is added to it.

        Returns:
            A zeroed buffer, shape (n,), to be used as the gradient's from now on: for half
            precision the same as before.
        """
        # What is left in the gradient's buffer is the new residual, and the old residual's buffer
        # becomes the gradient's: no copy of either is made.
        gradient, free = self._staged(), self.residual
        self.residual = self._accumulator if self._is_half else gradient
        self._finish()
        if self._is_half:
            self._accumulator, free = free, gradient
        add_owed(self.residual, owed)
        if self._decay != 1:
            self.residual.mul_(self._decay)
        return free.zero_()

    def commit_all(self) -> None:
        """All of acc was sent: nothing is owed but what rounding to half precision lost.

        The gradient's buffer stays the caller's.
        """
        self._staged()
        if self._is_half:
            self.residual, self._accumulator = self._accumulator, self.residual
        else:
            self.residual.zero_()
        self._finish()

    def discard(self) -> None:
        """Forget what was staged. The gradient's buffer stays the caller's; what it holds has no
        meaning.
        """
        self._gradient = None

    def _begin(self, flat: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """The buffer to accumulate in, which holds the gradient."""
        assert self._gradient is None, "the last step was neither committed nor discarded"
        self._gradient = flat
        self._new_selector_state = self.selector_state
        return (
            self._accumulator.copy_(flat if gradient is None else gradient)
            if self._is_half
            else flat
        )

    def _staged(self) -> torch.Tensor:
        assert self._gradient is not None, "nothing is staged"
        return self._gradient

    def _finish(self) -> None:
        self.selector_state = dict(self._new_selector_state)
        self._gradient = None


def add_owed(flat: torch.Tensor, owed: Sparse) -> None:
    """Add `owed` into `flat`, shape (owed.num_elements,), in place."""
    if flat.device.type == "cpu":
        _add_at(flat.numpy(), owed.indices, owed.values)
    else:
        flat.index_add_(
            0,
            on_device(torch.from_numpy(owed.indices), flat.device),
            on_device(torch.from_numpy(owed.values).to(flat.dtype), flat.device),
        )


@kernel
def _add_at(
    flat: NDArray[np.floating], indices: NDArray[np.int64], values: NDArray[np.floating]
) -> None:
    """flat[indices] += values, for indices within bounds."""
    for i in range(indices.size):
        flat[indices[i]] += values[i]
