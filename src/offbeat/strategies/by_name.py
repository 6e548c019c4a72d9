"""Strategies from text and back: "gtopk:density=0.01" on a command line, names and values in a
record.

Options are the fields of a strategy, and text becomes a value of a field's type. Values that are
objects or callables are given in Python only.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from offbeat.codec.option_value import NamedObjects, OptionValue
from offbeat.errors import ConfigError, nearest
from offbeat.strategies.docstrings import OptionDescription, describe_options
from offbeat.strategies.registry import REGISTRY

S = TypeVar("S")

_NAMES: Final = tuple[str, ...]
_TRUTH: Final = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as shown to people: its name, allowed values or type, default (as text) and a line
    of help.
    """

    name: str
    allowed: str
    default: str
    help: str


def strategy_type(name: str, kinds: Mapping[str, type[S]] | None = None) -> type[S]:
    """The strategy called `name`, of `kinds`, by default those of the registry. Raises
    `ConfigError` with the nearest name that exists.
    """
    known: Mapping[str, Any] = REGISTRY if kinds is None else kinds
    if name not in known:
        raise ConfigError(
            f"no strategy {name!r}; allowed are {', '.join(known)}{nearest(name, known)}"
        )
    found: type[S] = known[name]
    return found


def build_strategy(
    name: str, options: Mapping[str, object], kinds: Mapping[str, type[S]] | None = None
) -> S:
    """The strategy called `name`; text among the options becomes a value of the field's type.

    Args:
        name: which one.
        options: by name, as text or as values.
        kinds: strategies by name; None: those of the registry.

    Raises:
        ConfigError: no such strategy or option, or a value that is not allowed.
    """
    kind = strategy_type(name, kinds)
    known = _options_by_name(kind)
    values: dict[str, object] = {}
    of_objects: dict[str, dict[str, object]] = {}
    for option, value in options.items():
        if option not in known:
            raise ConfigError(
                f"strategy {name!r} has no option {option!r}; allowed are"
                f" {', '.join(known)}{nearest(option, known)}"
            )
        holder, described = known[option]
        target = values if holder is None else of_objects.setdefault(holder, {})
        try:
            target[option] = convert(described.hint, None if value == "none" else value)
        except (TypeError, ValueError):
            allowed, meaning = type_text(described.hint), described.meaning
            hint = f" ({meaning.rstrip('.')})" if meaning else ""
            raise ConfigError(
                f"option {option} of strategy {name!r}: got {value!r}; allowed is {allowed}{hint}"
            ) from None
    usual: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for holder, chosen in of_objects.items():
        values[holder] = dataclasses.replace(usual[holder], **chosen)
    return kind(**values)


def parse_spec(
    text: str,
    kinds: Mapping[str, type[Any]] | None = None,
    also: Callable[[type[Any]], list[str]] = lambda kind: [],
) -> tuple[str, dict[str, str]]:
    """A strategy with its options, as in "gtopk:density=0.01:codec=reuse".

    Args:
        text: of a command line.
        kinds: as in `build_strategy`.
        also: names that may be given with a strategy besides its options.

    Raises:
        ConfigError: no such strategy or option, or one is given twice.
    """
    name, *settings = text.strip().split(":")
    kind: type[Any] = strategy_type(name, kinds)
    known = [*asked_names(kind), *also(kind)]
    options: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise ConfigError(
                f"{setting!r} in {text!r} is no option of strategy {name!r}; write"
                f" {name}:key=value:key=value with"
                f" {', '.join(known) or 'nothing, since it has none'}{nearest(key, known)}"
            )
        if key in options:
            raise ConfigError(f"option {key} is given twice in {text!r}; give it once")
        options[key] = value
    return name, options


def strategy_values(strategy: object) -> dict[str, Any]:
    """Every option of `strategy` with its value."""
    values: dict[str, Any] = {}
    for name, (holder, _) in _options_by_name(type(strategy)).items():
        value = getattr(strategy if holder is None else getattr(strategy, holder), name)
        values[name] = list(value) if isinstance(value, tuple) else value
    return values


def options_of(kind: type[Any]) -> list[Option]:
    """What a command line takes for strategies of `kind`; the help is its docstring's."""
    return [
        Option(
            name=option.name,
            allowed=type_text(option.hint),
            default="required" if option.default is dataclasses.MISSING else _text(option.default),
            help=option.meaning,
        )
        for _, option in _options_by_name(kind).values()
    ]


def asked_names(kind: type[Any]) -> list[str]:
    """Names of the options that a command line takes."""
    return list(_options_by_name(kind))


def convert(hint: Any, value: object) -> object:
    """`value` as one of type `hint`: as it is where it is one, or read from text or from JSON.

    Raises:
        TypeError, ValueError: it is none.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(arguments, value)
    if origin is typing.Annotated:
        named = hint.__metadata__[0]
        if isinstance(named, NamedObjects) and value not in named:
            raise ValueError(f"{value!r} is none of {', '.join(named)}")
        return convert(arguments[0], value)
    if origin is typing.Literal:
        if value in arguments:
            return value
    elif hint == _NAMES and isinstance(value, str):
        return tuple(value.split(",")) if value else ()
    elif origin is tuple and isinstance(value, list | tuple):
        inner = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(convert(each, item) for each, item in zip(inner, value, strict=True))
    elif origin is Mapping:
        if isinstance(value, Mapping):
            return {convert(arguments[0], k): convert(arguments[1], v) for k, v in value.items()}
    elif origin is Callable:
        if callable(value):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUTH:
            return _TRUTH[value.lower()]
    elif hint is int and isinstance(value, str | int) and not isinstance(value, bool):
        return int(value)
    elif hint is float and isinstance(value, str | int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError(f"{value!r} is no {hint}")


def _first_that_fits(hints: tuple[Any, ...], value: object) -> object:
    # A number that is written as text is a number before it is text.
    for hint in sorted(hints, key=lambda hint: hint is str):
        try:
            return convert(hint, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{value!r} is none of {hints}")


def type_text(hint: object) -> str:
    """A type as people write it: `exact | reuse`, `number`, `number | none`."""
    names = {
        float: "number",
        int: "whole number",
        str: "text",
        bool: "true | false",
        type(None): "none",
    }
    if hint == _NAMES:
        return "names separated by commas"
    if typing.get_origin(hint) is typing.Annotated:
        kind, named = typing.get_args(hint)[:2]
        return " | ".join(named) if isinstance(named, NamedObjects) else type_text(kind)
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if parts := typing.get_args(hint):
        return " | ".join(type_text(part) for part in parts if _can_be_written(part))
    return (
        names.get(hint, getattr(hint, "__name__", str(hint)).lower())
        if isinstance(hint, type)
        else str(hint)
    )


def _options_by_name(kind: type[Any]) -> dict[str, tuple[str | None, OptionDescription]]:
    """The options of a strategy, each with the field that it is an option of, such as K-FAC's
    `curvature`; None: of the strategy itself.
    """
    found: dict[str, tuple[str | None, OptionDescription]] = {}
    for option in describe_options(kind):
        if dataclasses.is_dataclass(option.default):
            inner = describe_options(type(option.default))
            found |= {each.name: (option.name, each) for each in inner}
        else:
            found[option.name] = None, option
    return found


def _text(default: object) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default).lower()


def _can_be_written(hint: object) -> bool:
    """Whether a value of this type can be given as text: callables, tuples, mappings, dataclasses
    and objects of a user's own, as `LocalSGD` takes for `outer` and `GTopK` for `codec`, are given
    in Python only.
    """
    is_object = isinstance(hint, type) and issubclass(hint, OptionValue)
    in_python_only = dataclasses.is_dataclass(hint) or inspect.isabstract(hint) or is_object
    return typing.get_origin(hint) not in (Callable, tuple, Mapping) and not in_python_only
