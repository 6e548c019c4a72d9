"""A model attached as the lab attaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.lab.attached import Attached, InSession, Meter
from offbeat.lab.native import Native
from offbeat.lab.options import build_strategy


def attach(
    name: str,
    options: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
) -> Attached:
    recipe = build_strategy(name, options)
    if isinstance(recipe, Native):
        return recipe.attach(model, optimizer, Meter(world_size, rank=rank))
    return InSession(model, optimizer, offbeat.attach(model, optimizer, recipe))


def flat_parameters(model: nn.Module) -> list[float]:
    return [
        value for parameter in model.parameters() for value in parameter.detach().view(-1).tolist()
    ]
