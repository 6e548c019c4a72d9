"""What picks the entries that travel: a `Selector`, chosen by value in a strategy's options.

Two kinds stand here. How they find the largest entries is in `codec.select` for CPU tensors and in
`codec.cuda` for tensors on an accelerator. `codec.topk_codec` has the names of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from typing_extensions import override

from offbeat.codec import cuda, select
from offbeat.codec.option_value import OptionValue
from offbeat.codec.select import THRESHOLD, Selection


class Selector(OptionValue):
    """Picks about `k` entries of residual + weight * gradient.

    One object serves all buckets, so what it remembers from step to step is not kept in it but
    handed in and out as its state, a few numbers by name. `ErrorFeedback` keeps the state of a
    bucket, forgets it together with a step that is discarded, and checkpoints it.
    """

    def initial_state(self) -> Mapping[str, float]:
        """The state before the first step. Its keys are all keys there are."""
        return {}

    @abstractmethod
    def select(
        self,
        flat: torch.Tensor,
        residual: torch.Tensor,
        *,
        k: int,
        weight: float,
        state: Mapping[str, float],
    ) -> Selection:
        """Pick entries, and leave the others.

        Args:
            flat: the gradient: float32 or float64, shape (n,), on any device. Afterwards it holds
                residual + weight * flat, with zeros where entries were picked.
            residual: same shape, dtype and device, of another memory. It is not changed.
            k: how many entries are wanted, in [0, n]; 0 only where n is 0.
            weight: of `flat`.
            state: as `initial_state` or the last step's selection gave it.

        Returns:
            The picked entries, with indices ascending and no zeros among the values; no entries and
            `finite=False` where residual + weight * flat holds an infinity or a NaN.
        """


class Exact(Selector):
    """Exactly the `k` largest magnitudes, among equal ones those at lower indices."""

    @override
    def select(
        self,
        flat: torch.Tensor,
        residual: torch.Tensor,
        *,
        k: int,
        weight: float,
        state: Mapping[str, float],
    ) -> Selection:
        exact = select.exact if flat.device.type == "cpu" else cuda.exact
        return exact(flat, residual, k=k, weight=weight)


class ThresholdReuse(Selector):
    """What reaches the last step's threshold, if that is 0.8 k to 1.2 k entries; else the `k`
    largest. It takes fewer passes than `Exact`.
    """

    @override
    def initial_state(self) -> Mapping[str, float]:
        return {THRESHOLD: 0.0}

    @override
    def select(
        self,
        flat: torch.Tensor,
        residual: torch.Tensor,
        *,
        k: int,
        weight: float,
        state: Mapping[str, float],
    ) -> Selection:
        return reaching(flat, residual, k=k, weight=weight, threshold=state[THRESHOLD])


def reaching(
    flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, threshold: float
) -> Selection:
    """Pick what reaches `threshold`, if that is 0.8 k to 1.2 k entries, else the `k` largest.

    Args:
        flat: see `Selector.select`.
        residual: see `Selector.select`.
        k: see `Selector.select`.
        weight: see `Selector.select`.
        threshold: a magnitude; 0: there is none.
    """
    reuse = select.reuse if flat.device.type == "cpu" else cuda.reuse
    return reuse(flat, residual, k=k, weight=weight, threshold=threshold)
