"""Options of tasks and strategies: listed for people, routed from `key=value`, checked before
anything starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from offbeat.codec.option_value import OptionValue
from offbeat.errors import ConfigError, nearest
from offbeat.session.checkpoint import Json
from offbeat.strategies import REGISTRY
from offbeat.strategies.base import Strategy
from offbeat.strategies.docstrings import describe_options
from offbeat_lab.native import NATIVE, Native
from offbeat_lab.tasks import task_type

Recipe: TypeAlias = Strategy | Native
"""One of offbeat's strategies, or one that torch ships."""

RECIPES: Final[Mapping[str, type[Recipe]]] = {**REGISTRY, **NATIVE}

_OBJECTS_TOO: Final = ConfigDict(arbitrary_types_allowed=True)

BATCH_SHARES: Final = "batch_shares"
"""A setting of runs, and not of a task or a strategy: each worker's part of a step's samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as shown to people: its name, allowed values or type, default (as text) and a line
    of help.
    """

    name: str
    allowed: str
    default: str
    help: str


def strategy_type(name: str) -> type[Recipe]:
    """The strategy called `name`. Raises `ConfigError` with the nearest name that exists."""
    if name not in RECIPES:
        raise ConfigError(
            f"no strategy {name!r}; allowed are {', '.join(RECIPES)}{nearest(name, RECIPES)}"
        )
    return RECIPES[name]


def build_strategy(name: str, options: Mapping[str, object]) -> Recipe:
    """The strategy called `name`; strings among the options are converted to their fields' types.

    Raises:
        ConfigError: no such strategy or option, or a value that is not allowed.
    """
    kind = strategy_type(name)
    described = {option.name: option for option in describe_options(kind)}
    fields = list(described)
    values: dict[str, object] = {}
    for option, value in options.items():
        if option not in fields:
            raise ConfigError(
                f"strategy {name!r} has no option {option!r}; allowed are"
                f" {', '.join(fields)}{nearest(option, fields)}"
            )
        given = None if value == "none" else value
        try:
            values[option] = TypeAdapter[object](
                described[option].hint, config=_OBJECTS_TOO
            ).validate_python(given)
        except ValidationError as error:
            allowed, meaning = _type_text(described[option].hint), described[option].meaning
            hint = f" ({meaning.rstrip('.')})" if meaning else ""
            raise ConfigError(
                f"option {option} of strategy {name!r}: got {value!r}; allowed is {allowed}{hint}"
            ) from error
    return kind(**values)


def strategy_values(strategy: Recipe) -> dict[str, Json]:
    """Every option of `strategy` with its value."""
    return {name: getattr(strategy, name) for name in _field_names(type(strategy))}


def route(
    task: str, strategy: str, settings: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Divide `key=value` settings into options of the task and options of the strategy.

    Raises:
        ConfigError: not `key=value`, a key neither of them knows (with the nearest), or one given
            twice.
    """
    of_task = list(task_type(task).options_type.model_fields)
    of_strategy = _field_names(strategy_type(strategy))
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


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """A strategy with its options, as in "gtopk:density=0.01:selection=reuse". Raises
    `ConfigError`.
    """
    name, *settings = text.strip().split(":")
    kind = strategy_type(name)
    fields = [*_field_names(kind), *([BATCH_SHARES] if kind.weighs_samples else [])]
    options: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in fields:
            raise ConfigError(
                f"{setting!r} in {text!r} is no option of strategy {name!r}; write"
                f" {name}:key=value:key=value with"
                f" {', '.join(fields) or 'nothing, since it has none'}{nearest(key, fields)}"
            )
        if key in options:
            raise ConfigError(f"option {key} is given twice in {text!r}; give it once")
        options[key] = value
    return name, options


def task_options(name: str) -> list[Option]:
    """What `--set` takes for the task called `name`."""
    return [
        Option(
            name=option,
            allowed=_type_text(field.annotation),
            default="required" if field.is_required() else str(field.default).lower(),
            help=field.description or "",
        )
        for option, field in task_type(name).options_type.model_fields.items()
    ]


def strategy_options(name: str) -> list[Option]:
    """What `--set` takes for the strategy called `name`; the help is its docstring's."""
    kind = strategy_type(name)
    return [
        Option(
            name=option.name,
            allowed=_type_text(option.hint),
            default=(
                "required" if option.default is dataclasses.MISSING else str(option.default).lower()
            ),
            help=option.meaning,
        )
        for option in describe_options(kind)
        if option.name in _field_names(kind)
    ]


def _field_names(kind: type[Recipe]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _type_text(hint: object) -> str:
    """A type as people write it: `exact | reuse`, `number`, `number | none`."""
    names = {
        float: "number",
        int: "whole number",
        str: "text",
        bool: "true | false",
        type(None): "none",
    }
    if typing.get_origin(hint) is typing.Annotated:
        return _type_text(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if parts := typing.get_args(hint):
        return " | ".join(_type_text(part) for part in parts if _can_be_written(part))
    return (
        names.get(hint, getattr(hint, "__name__", str(hint)).lower())
        if isinstance(hint, type)
        else str(hint)
    )


def _can_be_written(hint: object) -> bool:
    """Whether a value of this type can be given as text: callables, tuples, dataclasses and objects
    of a user's own, as `LocalSGD` takes for `outer` and `GTopK` for `selection`, are given in
    Python only.
    """
    is_object = isinstance(hint, type) and issubclass(hint, OptionValue)
    in_python_only = dataclasses.is_dataclass(hint) or inspect.isabstract(hint) or is_object
    return typing.get_origin(hint) not in (Callable, tuple) and not in_python_only
