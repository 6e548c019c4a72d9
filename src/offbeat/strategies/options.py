"""Checks of options: each raises `ConfigError` with what was got, what is allowed and the likely
fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from inspect import formatannotation
from math import nan
from typing import Any, Final, SupportsFloat

import torch

from offbeat.errors import ConfigError, UnsupportedError, nearest

_NEVER_TEXT: Final = {"bool", "int", "float", "None"}


def refuse_text(options: Any) -> None:
    """Refuse text for an option that is a number or a truth value: "false" would count as true.

    Args:
        options: a dataclass, whose fields they are, and those of dataclasses among its values.
    """
    for option in fields(options):
        value, kind = getattr(options, option.name), option.type
        kinds = (kind if isinstance(kind, str) else formatannotation(kind)).split(" | ")
        if isinstance(value, str) and _NEVER_TEXT.issuperset(kinds):
            raise ConfigError(
                f"{option.name} must be {' or '.join(kinds)}, got the text {value!r}; write it"
                " without quotation marks"
            )
        if is_dataclass(value) and not isinstance(value, type):
            refuse_text(value)


def number_of(value: object) -> float:
    """`value` as a number; nan, which no range has, where it is none."""
    return float(value) if isinstance(value, SupportsFloat) else nan


def require_positive(name: str, value: float) -> None:
    if not number_of(value) > 0:
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


def refuse_idle(strategy: Any, *names: str, because: str) -> None:
    """Refuse options that would do nothing beside the others, unless they are left as they are by
    default.

    Args:
        strategy: a dataclass, whose options they are.
        names: of the options.
        because: why they would do nothing, to stand after the word.
    """
    for option in fields(strategy):
        value = getattr(strategy, option.name)
        if option.name in names and value != option.default:
            raise ConfigError(
                f"{option.name}={value!r} would do nothing, because {because}; leave it out"
            )


def require_density(name: str, value: float) -> None:
    number = number_of(value)
    if isinstance(value, bool) or not 0 < number <= 1:
        hint = f"; {value}% is {name}={number / 100:g}" if 1 < number <= 100 else ""
        raise ConfigError(
            f"{name} is the fraction of gradient entries that travel, in (0, 1], got"
            f" {value!r}{hint}"
        )


def require_fraction_below_one(name: str, value: float) -> None:
    if not 0 <= number_of(value) < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {value!r}")


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
