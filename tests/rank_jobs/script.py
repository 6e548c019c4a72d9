"""What processes do that a script starts."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def name_of_ddps_reducer() -> str:
    """Trains one step, in the group that is there."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return type(model.reducer).__name__
