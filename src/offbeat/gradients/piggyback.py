"""A small bucket's gradient, sent whole inside the messages of another bucket's exchange: two
buckets, one exchange.

    the small bucket's reduction     hand_in ............................. wait, sums
    the carrying one's                        combine, exchange, wait, split

So the small bucket stands before the carrying one in the order of launching: what `combine` reads
was handed in for the same exchange.

Where messages are small their number is what they cost, and on busy machines each exchange more
makes every rank wait for the slowest once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.tally import Tally


@dataclass(frozen=True, slots=True)
class PiggybackSize:
    """How much is carried.

    Attributes:
        num_parameters: of the small bucket.
        num_elements: of the small bucket.
    """

    num_parameters: int = 0
    num_elements: int = 0


class Piggyback:
    """What two reductions share: that of a small bucket, which is launched first, and that of the
    bucket whose messages carry it.

    Args:
        size: of the small bucket.
        dtype: in which its elements travel and are summed.
    """

    def __init__(self, size: PiggybackSize, dtype: np.dtype[np.floating]) -> None:
        self.size = size
        self._dtype = dtype
        self._handed_in = self._brought = Tally.of_nobody(size.num_parameters)
        self._is_handed_in = False
        self._wait: Callable[[], object] | None = None

    # The small bucket's reduction calls these

    def hand_in(self, flat: torch.Tensor, tally: Tally) -> None:
        """Contribute `flat`, shape (num_elements,), and `tally`; zeros, if this rank failed."""
        whole = np.zeros(self.size.num_elements, dtype=self._dtype)
        if not tally.num_failed:
            whole[:] = flat.detach().to(device="cpu", dtype=_torch_dtype(self._dtype)).numpy()
        self._handed_in, self._is_handed_in = replace(tally, whole=whole), True

    def wait(self) -> Tally:
        """Wait for the carrying exchange. Returns the small bucket's tally of all ranks."""
        assert self._wait is not None, "no reduction carries this bucket"
        self._wait()
        return self._brought.without_whole()

    @property
    def sums(self) -> NDArray[np.floating]:
        """Over the ranks, shape (num_elements,); after `wait`."""
        return self._brought.whole

    # The carrying reduction calls these

    def carried_by(self, wait: Callable[[], object]) -> None:
        """The carrying reduction's `wait`, which calls `split`; a second call changes nothing."""
        self._wait = wait

    def combine(self, tally: Tally) -> Tally:
        """What travels with the carrying bucket, whose own tally is `tally`."""
        assert self._is_handed_in, "the small bucket was not launched before the carrying one"
        self._is_handed_in = False
        return replace(
            tally,
            num_nonfinite=max(tally.num_nonfinite, self._handed_in.num_nonfinite),
            used=np.concatenate([tally.used, self._handed_in.used]),
            whole=self._handed_in.whole,
        )

    def split(self, merged: Tally) -> Tally:
        """The carrying bucket's part of what all ranks' tallies have become."""
        own = merged.used.size - self.size.num_parameters
        self._brought = replace(merged, used=merged.used[own:])
        return replace(merged.without_whole(), used=merged.used[:own])


def _torch_dtype(dtype: np.dtype[np.floating]) -> torch.dtype:
    return torch.float64 if dtype == np.float64 else torch.float32
