"""Checks of options: each raises `ConfigError` with what was got, what is allowed and the likely
fix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.errors import ConfigError, UnsupportedError, nearest


def require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be greater than 0, got {value!r}")


def require_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got"
            f" {value!r}{nearest(str(value), allowed)}"
        )


def require_density(name: str, value: float) -> None:
    if not 0 < value <= 1:
        hint = f"; {value}% is {name}={value / 100:g}" if 1 < value <= 100 else ""
        raise ConfigError(
            f"{name} is the fraction of gradient entries that travel, in (0, 1], got"
            f" {value!r}{hint}"
        )


def require_fraction_below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {value!r}")


def require_dense_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """For strategies that exchange gradients, which are dense afterwards."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam takes sparse gradients only, and exchanged ones are dense; use"
            " torch.optim.Adam, or a strategy that averages weights alone, such as"
            " offbeat.LocalSGD()"
        )
