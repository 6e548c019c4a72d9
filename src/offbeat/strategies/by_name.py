"""Strategies from text and back: "gtopk:density=0.01" on a command line, names and values in a
record.

Options are the fields of a strategy, and text becomes a value of a field's type. Values that are
objects or callables are given in Python only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from offbeat.codec.described_options import OptionDescription, allows, describe_options, type_text
from offbeat.errors import ConfigError, nearest
from offbeat.strategies.registry import REGISTRY

S = TypeVar("S")

_CONSTANTS: Final = {"true": True, "false": False, "none": None}


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
        read = [each for each in _readings(value) if allows(described.hint, each)]
        if not read:
            raise described.refusal(value, in_text=True)
        target[option] = read[0]
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


def _readings(value: object) -> Iterator[object]:
    """What `value`, as text, from JSON or of Python, may mean: numbers before text."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            yield float(value)
    if isinstance(value, str):
        with suppress(ValueError):
            yield int(value)
        if value.lower() in _CONSTANTS:
            yield _CONSTANTS[value.lower()]
        yield tuple(value.split(",")) if value else ()
    yield _tupled(value)


def _tupled(value: object) -> object:
    """Tuples in the place of JSON's lists."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _options_by_name(kind: Any) -> dict[str, tuple[str | None, OptionDescription]]:
    """The options of a strategy, each with the field that it is an option of, such as K-FAC's
    `curvature`; None: of the strategy itself.
    """
    found: dict[str, tuple[str | None, OptionDescription]] = {}
    for option in describe_options(kind):
        if dataclasses.is_dataclass(option.default):
            inner: Any = type(option.default)
            found |= {each.name: (option.name, each) for each in describe_options(inner)}
        else:
            found[option.name] = None, option
    return found


def _text(default: object) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default).lower()
