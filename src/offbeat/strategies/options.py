"""Checks of options: each raises `ConfigError` with what was got, what is allowed and the likely
fix.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from offbeat.errors import ConfigError, UnsupportedError


def refuse_idle(strategy: Any, name: str, *, because: str) -> None:
    """Refuse an option that would do nothing beside the others, unless it is left as it is by
    default.

    Args:
        strategy: a dataclass, whose option it is.
        name: of the option.
        because: why it would do nothing, to stand after the word.
    """
    default = next(option.default for option in fields(strategy) if option.name == name)
    if (value := getattr(strategy, name)) != default:
        raise ConfigError(f"{name}={value!r} would do nothing, because {because}; leave it out")


def require_density(value: float) -> None:
    if not 0 < value <= 1:
        hint = f"; {value}% is density={value / 100:g}" if 1 < value <= 100 else ""
        raise ConfigError(
            "density is the fraction of gradient entries that travel, in (0, 1], got"
            f" {value!r}{hint}"
        )


def require_dense_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """For strategies that exchange gradients, which are dense afterwards."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam takes sparse gradients only, and exchanged ones are dense; use"
            " torch.optim.Adam, or a strategy that averages weights alone, such as"
            " offbeat.LocalSGD()"
        )


def require_real(model: torch.nn.Module) -> None:
    """Raise `UnsupportedError` where parameters that train are complex."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UnsupportedError(
                f"parameter {name!r} is not real-valued, and the largest entries are selected among"
                " real numbers only; train its real and imaginary parts as two parameters, or use"
                " offbeat.AllReduce()"
            )
