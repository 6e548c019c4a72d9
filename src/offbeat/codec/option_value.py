"""Objects that a user puts into a strategy's options, and checks of options: each raises
`ConfigError` with what was got, what is allowed and the likely fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Generic, SupportsFloat, TypeVar, cast

from typing_extensions import override

from offbeat.errors import ConfigError, nearest

T = TypeVar("T")


class OptionValue:
    """An object that stands for the values it holds: two of one class are equal if their attributes
    are.

    Its description holds no address, because all ranks compare descriptions of their options.
    """

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(repr(self))


class NamedObjects(Mapping[str, T], Generic[T]):
    """Objects by the names that options may use for them. One is made when it is asked for, so that
    its file may import whatever reads the table.

    Args:
        homes: by name, the module and the class, which is made without options or of one text, as
            "offbeat.codec.selectors:Exact" or "offbeat.codec.topk_codec:AllChanges:linear4".
    """

    def __init__(self, **homes: str) -> None:
        self._homes = homes

    @override
    def __getitem__(self, name: str) -> T:
        module, class_name, *text = self._homes[name].split(":")
        return cast(T, getattr(import_module(module), class_name)(*text))

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    @override
    def __len__(self) -> int:
        return len(self._homes)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._homes

    @override
    def __hash__(self) -> int:
        return id(self)  # so that it may stand in an annotation


def require_positive(name: str, value: float) -> None:
    if not (isinstance(value, SupportsFloat) and float(value) > 0):
        raise ConfigError(f"{name} must be greater than 0, got {value!r}")


def require_at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got"
            f" {value!r}{nearest(str(value), allowed)}"
        )
