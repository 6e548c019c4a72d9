"""What the ranks of `test_lab_ranks.py` do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat.errors import UnsupportedError
from offbeat.lab.attaching import AttachedModel, attach_recipe
from offbeat.lab.options import build_strategy


def for_each(
    rank: int, world_size: int, *, steps: int, strategies: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Train with several strategies, one after the other in the same processes, and say what each
    did.
    """
    return {
        label: train(rank, world_size, steps, name, options)
        for label, (name, options) in strategies.items()
    }


def train(
    rank: int, world_size: int, steps: int, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        attached = attach(name, options, model, optimizer, rank, world_size)
    except UnsupportedError as error:
        return {"refused": str(error)}
    trace = []
    with attached.session as session:
        for step in range(1, steps + 1):
            before = session.stats
            generator = torch.Generator().manual_seed(100 * step + rank)
            x, y = (
                torch.randn((8, 16), generator=generator),
                torch.randn((8, 4), generator=generator),
            )
            attached.backward(nn.functional.mse_loss(attached.module(x), y))
            attached.optimizer.step()
            attached.optimizer.zero_grad()
            after = session.stats
            trace.append(
                {
                    "bytes": after.bytes_sent - before.bytes_sent,
                    "messages": after.messages_sent - before.messages_sent,
                    "waited": after.wait_s > before.wait_s,
                    "ready": session.take_ready_at_s() is not None,
                    "channels": [arrival.channel for arrival in session.take_arrivals()],
                    "parameters": parameters(model),
                }
            )
    return {
        "steps": trace,
        "counted": session.stats.steps,
        "num_parameters": len(parameters(model)),
    }


def attach(
    name: str,
    options: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
) -> AttachedModel:
    recipe = build_strategy(name, options)
    return attach_recipe(recipe, model, optimizer, rank=rank, world_size=world_size)


def parameters(model: nn.Module) -> list[float]:
    return [
        value for parameter in model.parameters() for value in parameter.detach().view(-1).tolist()
    ]
