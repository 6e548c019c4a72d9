"""A small model and its steps, the same wherever they are taken: ranks are threads, which share
torch's own random numbers.
"""

from __future__ import annotations

import torch


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)]
    model = torch.nn.Sequential(*layers).double()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return model


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step of a rank on the batch that it has then."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
