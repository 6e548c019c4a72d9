"""What is owed, sparsely, is added to a vector."""

from __future__ import annotations

import torch

from offbeat.codec.device_copies import on_device
from offbeat.codec.sparse import Sparse


def add_owed(flat: torch.Tensor, owed: Sparse) -> None:
    """Add `owed` into `flat`, shape (owed.num_elements,), in place."""
    flat.index_add_(
        0,
        on_device(torch.from_numpy(owed.indices), flat.device),
        on_device(torch.from_numpy(owed.values).to(flat.dtype), flat.device),
    )
