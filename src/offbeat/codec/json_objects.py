"""Frozen dataclasses from JSON, checked against their annotations: for what peers and workers
send.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_MOST = 1 << 63
"""Numbers are below it, so that arrays can hold them."""


def build(kind: type[T], value: object) -> T:
    """The `kind` that `value`, read from JSON, describes.

    `kind` may be made of dataclasses, named tuples, tuples, literals, unions, strings, truth values
    and numbers. A field without a default must be there, and one that does not exist must not.

    Raises:
        TypeError, ValueError: `value` is something else.
    """
    return cast(T, _build(kind, value))


def _build(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments, value)
    if origin is Literal:
        return _required(isinstance(value, str) and value in arguments, value, kind)
    if origin is tuple:
        many = arguments[-1] is ... and isinstance(value, list)
        kinds = [arguments[0]] * len(value) if many else list(arguments)
        return tuple(_from_list(kinds, value, kind))
    if is_dataclass(kind):
        return _from_fields(kind, value)
    if hasattr(kind, "_fields"):
        return kind(*_from_list(list(_hints(kind).values()), value, kind))
    if kind is float and type(value) is int:
        value = float(value)
    return _required(
        type(value) is kind and (kind is not int or -_MOST <= value < _MOST), value, kind
    )


def _from_fields(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    values = _required(isinstance(value, Mapping), value, kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    _required(needed <= values.keys() <= hints.keys(), value, kind)
    return kind(**{name: _build(hints[name], item) for name, item in values.items()})


def _from_list(kinds: Sequence[Any], value: Any, kind: Any) -> list[Any]:
    items = _required(isinstance(value, list) and len(value) == len(kinds), value, kind)
    return [_build(*pair) for pair in zip(kinds, items, strict=True)]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _first_that_fits(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _build(kind, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{value!r:.80} is none of {kinds}")


def _required(fits: bool, value: Any, kind: Any) -> Any:
    if not fits:
        raise TypeError(f"{value!r:.80} is no {kind}")
    return value
