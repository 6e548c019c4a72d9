"""Frozen dataclasses from JSON, checked against their annotations: for what peers and workers send,
and for what stands in records.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import cycle
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from offbeat.codec.described_options import NotNegative, Range

T = TypeVar("T")

_Reader: TypeAlias = Callable[[Any], Any]

_NESTED = re.compile(r"[\w.]+: ")
"""A message that begins with a field, to which the fields around it are added."""

_MOST = 1 << 63
"""Numbers are below it, so that arrays can hold them."""


Count: TypeAlias = NotNegative
"""How many, or which one."""


def build(kind: type[T], value: object) -> T:
    """The `kind` that `value`, read from JSON, describes.

    `kind` may be made of dataclasses, named tuples, tuples, sequences, mappings with keys of text,
    literals, unions, strings, truth values and numbers; `object` is whatever JSON can say. A field
    without a default must be there, and one that does not exist must not.

    Raises:
        TypeError, ValueError: `value` is something else; the message begins with the field.
    """
    annotation: Any = kind
    return cast(T, _reader(annotation)(value))


# What an annotation means is found out once. Between two merges workers take hundreds of claims,
# and to look at the annotations of each took most of what a merge computes.
@cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return lambda value: value
    if origin is Annotated:
        return _bounded(_reader(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments)
    if origin is Literal:
        return lambda value: _required(isinstance(value, str) and value in arguments, value, kind)
    if origin is tuple:
        items_of = _list_of(kind, arguments)
        return lambda value: tuple(items_of(value))
    if origin is Sequence:
        return _list_of(kind, (*arguments, ...))
    if origin is Mapping:
        return _mapping_of(kind, arguments[1])
    if is_dataclass(kind):
        return _object_of(kind)
    if hasattr(kind, "_fields"):
        values_of = _list_of(kind, tuple(get_type_hints(kind).values()))
        return lambda value: kind(*values_of(value))
    if kind is int:
        return _whole_number
    if kind is float:
        return _number
    return lambda value: _required(type(value) is kind, value, kind)


def _object_of(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    needed = {
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(value: Any) -> Any:
        values = _required(isinstance(value, Mapping), value, kind)
        if not needed <= values.keys() <= readers.keys():
            missing, unknown = needed - values.keys(), values.keys() - readers.keys()
            what = f"{min(missing)}: is missing" if missing else f"{min(unknown):.40}: is unknown"
            raise TypeError(what)
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, item in values.items():
                found[name] = readers[name](item)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}{'.' if _NESTED.match(str(error)) else ': '}{error}") from None
        return kind(**found)

    return read


def _mapping_of(kind: Any, item_kind: Any) -> _Reader:
    reader = _reader(item_kind)

    def read(value: Any) -> Any:
        values = _required(isinstance(value, dict), value, kind)
        return {key: reader(item) for key, item in values.items()}

    return read


def _bounded(reader: _Reader, bounds: Range) -> _Reader:
    def read(value: Any) -> Any:
        number = reader(value)
        if not bounds.has(number):
            raise ValueError(f"{number!r} is no number {bounds.words}")
        return number

    return read


def _list_of(kind: Any, kinds: tuple[Any, ...]) -> Callable[[Any], list[Any]]:
    """Reads a list of as many values as there are `kinds`; of any number, where `...` follows the
    only one.
    """
    is_any_number = kinds[-1] is ...
    readers = tuple(map(_reader, kinds[:1] if is_any_number else kinds))

    def read(value: Any) -> list[Any]:
        fits = isinstance(value, list) and (is_any_number or len(value) == len(readers))
        items = _required(fits, value, kind)
        each = cycle(readers) if is_any_number else readers
        return [reader(item) for reader, item in zip(each, items, strict=not is_any_number)]

    return read


def _first_that_fits(kinds: tuple[Any, ...]) -> _Reader:
    readers = tuple(map(_reader, kinds))

    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except (TypeError, ValueError):
                continue
        raise TypeError(f"{value!r:.80} is none of {kinds}")

    return read


def _whole_number(value: Any) -> Any:
    return _required(type(value) is int and -_MOST <= value < _MOST, value, int)


def _number(value: Any) -> Any:
    return float(value) if type(value) is int else _required(type(value) is float, value, float)


def _required(fits: bool, value: Any, kind: Any) -> Any:
    if not fits:
        raise TypeError(f"{value!r:.80} is no {kind}")
    return value
