"""Selection layer by layer: each parameter has a share of the k entries for itself.

    k of a layer = k * elements of the layer / all elements, and at least 1

so every layer has the same density. Magnitudes of different layers are not compared then, and a
layer with small gradients waits no longer than another one. Shares in proportion to size are what
layer-wise sparsification without a cost model does (LAGS-SGD, arXiv 1911.08727).

Cost: the inner selector's, and some tens of microseconds for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from typing_extensions import override

from offbeat.codec.select import Selection
from offbeat.codec.selectors import Selector
from offbeat.codec.sparse import Sparse


class ByLayer(Selector):
    """Lets another selector pick within each layer.

    Args:
        inner: picks.
        offsets: where each layer begins, and the end of the last one.
        names: of the layers, for their state.
    """

    def __init__(self, inner: Selector, *, offsets: Sequence[int], names: Sequence[str]) -> None:
        self._inner = inner
        self._layers = list(zip(names, pairwise(offsets), strict=True))

    @override
    def initial_state(self) -> Mapping[str, float]:
        return {
            f"{key}/{name}": value
            for name, _ in self._layers
            for key, value in self._inner.initial_state().items()
        }

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
        num_elements, after = flat.numel(), dict[str, float]()
        indices, values, finite = [np.empty(0, dtype=np.int64)], list[np.ndarray](), True
        for name, (begin, end) in self._layers:
            mine = {key: state[f"{key}/{name}"] for key in self._inner.initial_state()}
            selection = self._inner.select(
                flat[begin:end],
                residual[begin:end],
                k=min(end - begin, max(1, round(k * (end - begin) / num_elements))),
                weight=weight,
                state=mine,
            )
            finite &= selection.finite
            after |= {f"{key}/{name}": value for key, value in selection.state.items()}
            indices.append(selection.sparse.indices + begin)
            values.append(selection.sparse.values)
        if not finite or not values:
            dtype = values[0].dtype if values else np.dtype(np.float32)
            return Selection(sparse=Sparse.empty(num_elements, dtype), finite=finite)
        picked = Sparse(
            indices=np.concatenate(indices),
            values=np.concatenate(values),
            num_elements=num_elements,
        )
        return Selection(sparse=picked, finite=True, state=after)
