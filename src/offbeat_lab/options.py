"""Options of tasks and strategies: listed for people, routed from `key=value`, checked before
anything starts.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Final

from offbeat.codec.described_options import type_text
from offbeat.errors import ConfigError, nearest
from offbeat.run.recipes import SCRIPT_STRATEGIES
from offbeat.strategies import by_name
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import Option, asked_names, options_of
from offbeat_lab.native import NATIVE
from offbeat_lab.tasks import task_type

RECIPES: Final[Mapping[str, type[Strategy]]] = ChainMap(
    {**NATIVE},
    SCRIPT_STRATEGIES,  # type: ignore[arg-type]  # it is only read
)
"""Strategies by name: those of offbeat, and those that torch ships."""

BATCH_SHARES: Final = "batch_shares"
"""A setting of runs, and not of a task or a strategy: each worker's part of a step's samples."""


def strategy_type(name: str) -> type[Strategy]:
    """The strategy called `name`. Raises `ConfigError` with the nearest name that exists."""
    return by_name.strategy_type(name, RECIPES)


def build_strategy(name: str, options: Mapping[str, object]) -> Strategy:
    """The strategy called `name`; text among the options becomes a value of the field's type.

    Raises:
        ConfigError: no such strategy or option, or a value that is not allowed.
    """
    return by_name.build_strategy(name, options, RECIPES)


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """A strategy with its options, as in "gtopk:density=0.01:codec=reuse". Raises
    `ConfigError`.
    """

    def also(kind: type[Strategy]) -> list[str]:
        return [BATCH_SHARES] if kind.weighs_samples else []

    return by_name.parse_spec(text, RECIPES, also)


def route(
    task: str, strategy: str, settings: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Divide `key=value` settings into options of the task and options of the strategy.

    Raises:
        ConfigError: not `key=value`, a key neither of them knows (with the nearest), or one given
            twice.
    """
    of_task = list(task_type(task).options_type.model_fields)
    of_strategy = asked_names(strategy_type(strategy))
    chosen: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--set takes key=value, got {setting!r}; for example --set density=0.01"
            )
        if key not in of_task and key not in of_strategy:
            raise ConfigError(
                f"neither task {task!r} nor strategy {strategy!r} has an option {key!r}; allowed"
                f" are {', '.join(of_task + of_strategy)}{nearest(key, of_task + of_strategy)}"
            )
        target = chosen[0] if key in of_task else chosen[1]
        if key in target:
            raise ConfigError(f"--set {key} is given twice; give it once")
        target[key] = value
    return chosen


def split_shares(settings: Sequence[str]) -> tuple[list[float], list[str]]:
    """Take `batch_shares=1/1/0.5/0.5` out of `key=value` settings.

    Returns:
        The shares, by worker, empty where there are none; and the other settings.

    Raises:
        ConfigError: it is given twice, or is no list of numbers above 0.
    """
    of_shares = [each for each in settings if each.startswith(f"{BATCH_SHARES}=")]
    others = [each for each in settings if each not in of_shares]
    if len(of_shares) > 1:
        raise ConfigError(f"{BATCH_SHARES} is given twice; give it once")
    if not of_shares:
        return [], others
    text = of_shares[0].partition("=")[2]
    try:
        shares = [float(part) for part in text.split("/")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ConfigError(
            f"{BATCH_SHARES} is {text!r}; allowed are numbers above 0 for each worker, such as"
            " 1/1/0.5/0.5"
        )
    return shares, others


def task_options(name: str) -> list[Option]:
    """What `--set` takes for the task called `name`."""
    return [
        Option(
            name=option,
            allowed=type_text(field.annotation),
            default="required" if field.is_required() else str(field.default).lower(),
            help=field.description or "",
        )
        for option, field in task_type(name).options_type.model_fields.items()
    ]


def strategy_options(name: str) -> list[Option]:
    """What `--set` takes for the strategy called `name`."""
    return options_of(strategy_type(name))
