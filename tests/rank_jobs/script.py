"""What processes do that a script starts."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def name_of_ddps_reducer() -> str:
    """Trains one step, in the group that is there."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return type(model.reducer).__name__


def step_around_the_wrapper() -> None:
    """Trains a model that is wrapped, and never calls the wrapper."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def step_by_hand() -> None:
    """Trains one step without any optimizer."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


def clips_by_name() -> bool:
    """Whether what this module has imported by name is what stands there now."""
    return clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
