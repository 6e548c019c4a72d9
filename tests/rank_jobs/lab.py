"""A model attached as the lab attaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat_lab.attaching import TaskModel, attach_recipe
from offbeat_lab.options import build_strategy


def attach(
    name: str,
    options: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world_size: int,
) -> TaskModel:
    recipe = build_strategy(name, options)
    return attach_recipe(recipe, model, optimizer, world_size=world_size)


def flat_parameters(model: nn.Module) -> list[float]:
    return [
        value for parameter in model.parameters() for value in parameter.detach().view(-1).tolist()
    ]
