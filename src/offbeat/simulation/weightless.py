"""The largest entries of vectors without content."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import torch
from typing_extensions import override

from offbeat.codec.selectors import Memory, Selection, Selector
from offbeat.codec.sparse import Sparse
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.weightless import WeightlessSparse, WeightlessWire
from offbeat.codec.wire import Wire

LayOut: TypeAlias = Callable[[Wire], WeightlessWire]
"""The arithmetic with numbers of entries in the place of that with entries."""


class WeightlessCodec(TopKCodec):
    """Selects and writes numbers of entries where `codec` does entries.

    Args:
        codec: what it stands for.
        selected: is told of each selection: elements of the vector, and k.
        shared: which part of one rank's largest entries another rank has too, 0 to 1.
        lay_out: makes the layout of messages.
    """

    def __init__(
        self,
        codec: TopKCodec,
        *,
        selected: Callable[[int, int], None],
        shared: float,
        lay_out: LayOut,
    ) -> None:
        selector = _NumberSelector(selected, shared)
        super().__init__(selector=selector, values=codec.values, indices=codec.indices)
        self.lay_out = lay_out

    @override
    def wire(self, num_elements: int, *, num_parameters: int, dtype: np.dtype[np.floating]) -> Wire:
        real = super().wire(num_elements, num_parameters=num_parameters, dtype=dtype)
        return cast(Wire, self.lay_out(real))  # collectives know either as arithmetic


class _NumberSelector(Selector):
    def __init__(self, selected: Callable[[int, int], None], shared: float) -> None:
        self.selected, self.shared = selected, shared

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        num_elements = flat.numel()
        self.selected(num_elements, k)
        # Two ranks have the part `shared` in common, or as much as they have by chance.
        num_places = min(num_elements, k / max(self.shared, k / num_elements))
        return Selection(sparse=cast(Sparse, WeightlessSparse(k, num_places)), finite=True)
