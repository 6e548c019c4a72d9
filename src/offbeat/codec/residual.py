"""What is owed, sparsely, is added to a vector."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.device_copies import on_device
from offbeat.codec.jit import kernel
from offbeat.codec.sparse import Sparse


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
