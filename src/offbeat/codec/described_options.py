"""Options as annotations and docstrings describe them. What an option may be stands in its
annotation, by which it is checked, written and read. Its text stands once in the source, in the
`Args:` section of the dataclass that defines the field; subclasses show it too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
)

from offbeat.codec.option_value import NamedObjects, OptionValue
from offbeat.errors import ConfigError, nearest

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ \t]+.*(?:\n|\Z)|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)

_UNIONS: Final = (typing.Union, types.UnionType)
_WORDS: Final[Mapping[Any, str]] = {
    float: "number",
    int: "whole number",
    str: "text",
    bool: "true | false",
    type(None): "none",
}
_NAMES: Final = tuple[str, ...]


class Range(NamedTuple):
    """Stands in the annotation of a number.

    Attributes:
        words: where the number must be, to stand behind "number" or "whole number".
        has: whether a number is there; a NaN is nowhere.
    """

    words: str
    has: Callable[[Any], bool]


NotNegative: TypeAlias = Annotated[int, Range("of at least 0", lambda number: number >= 0)]
OneOrMore: TypeAlias = Annotated[int, Range("of at least 1", lambda number: number >= 1)]
TwoOrMore: TypeAlias = Annotated[int, Range("of at least 2", lambda number: number >= 2)]
Positive: TypeAlias = Annotated[float, Range("greater than 0", lambda number: number > 0)]
UpToOne: TypeAlias = Annotated[float, Range("in (0, 1]", lambda number: 0 < number <= 1)]
ZeroToOne: TypeAlias = Annotated[float, Range("in [0, 1]", lambda number: 0 <= number <= 1)]
BelowOne: TypeAlias = Annotated[float, Range("in [0, 1)", lambda number: 0 <= number < 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionDescription:
    """One option of a strategy.

    Attributes:
        of: the class whose option it is.
        name: its name.
        hint: its type, evaluated.
        default: its default, or `dataclasses.MISSING`.
        meaning: what its docstring says, on one line.
    """

    of: type
    name: str
    hint: Any
    default: object
    meaning: str

    def refusal(self, value: object, *, in_text: bool = False) -> ConfigError:
        """That the option cannot be `value`, which was given in Python, or `in_text`."""
        allowed = type_text(self.hint, in_text=in_text)
        meaning = f" ({self.meaning.rstrip('.')})" if self.meaning else ""
        return ConfigError(
            f"option {self.name} of {self.of.__name__}: got {value!r}; allowed is"
            f" {allowed}{meaning}{nearest(str(value), allowed.split(' | '))}"
        )


def check_options(options: Any) -> None:
    """Raise `ConfigError` where a field of a dataclass holds what its annotation does not allow."""
    kind: Any = type(options)
    for option in describe_options(kind):
        if not allows(option.hint, value := getattr(options, option.name)):
            raise option.refusal(value)


def allows(hint: Any, value: Any) -> bool:
    """Whether an option of type `hint` may be `value`. A list will do for a tuple."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(allows(each, value) for each in arguments)
    if origin is Annotated:
        kind, limit = arguments[:2]
        if not allows(kind, value):
            return False
        return bool(limit.has(value) if isinstance(limit, Range) else value in limit)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        return arguments[-1] is not ... or all(allows(arguments[0], each) for each in value)
    if hint in (int, float):
        kind = SupportsIndex if hint is int else SupportsFloat  # NumPy has numbers, too
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    return hint is Any or isinstance(value, origin or hint)


def type_text(hint: Any, *, in_text: bool = True) -> str:
    """A type as people write it: `exact | reuse`, `number`, `number | none`.

    Args:
        hint: the type.
        in_text: leave out what is given in Python only: callables, tuples, mappings, dataclasses
            and objects of a user's own, as `LocalSGD` takes for `outer` and `GTopK` for `codec`.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, limit = arguments[:2]
        if isinstance(limit, NamedObjects):
            return " | ".join(limit)
        return f"{type_text(kind)} {limit.words}" if isinstance(limit, Range) else type_text(kind)
    if hint == _NAMES:
        return "names separated by commas" if in_text else 'a tuple, as ("first", "second")'
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in _UNIONS:
        parts = [part for part in arguments if not (in_text and _is_object(part))]
        return " | ".join(type_text(part, in_text=in_text) for part in parts)
    name = str(getattr(origin or hint, "__name__", hint))
    return name.lower() if in_text else name


def _is_object(hint: Any) -> bool:
    """Whether values of this type cannot be given as text."""
    if typing.get_origin(hint) in (Callable, tuple, Mapping):
        return True
    is_object = isinstance(hint, type) and issubclass(hint, OptionValue)
    return is_object or dataclasses.is_dataclass(hint) or inspect.isabstract(hint)


def option_texts(kind: type) -> dict[str, str]:
    """What the docstrings of `kind` and its bases say about each option, with their line breaks.

    The options of `kind` come first, then those of each base; a subclass may say something else
    about an option than its base does.
    """
    texts: dict[str, str] = {}
    for base in kind.__mro__:
        section = _SECTION.search(inspect.cleandoc(base.__doc__ or ""))
        for name, text in _ENTRY.findall(section[1]) if section else ():
            texts.setdefault(name, text)
    return texts


def complete_docstring(kind: type) -> None:
    """Write the options that `kind` inherits into its docstring too, so that `help()` and
    generated documentation show all of them.
    """
    own = kind.__dict__.get("__doc__")
    if own is None:
        return
    text = inspect.cleandoc(own)
    if not (texts := option_texts(kind)):
        return
    entries = "".join(f"    {name}: {entry}\n" for name, entry in texts.items())
    section = _SECTION.search(text)
    before, after = (
        (text, "") if section is None else (text[: section.start()], text[section.end() :])
    )
    parts = (before.strip(), f"Args:\n{entries}".rstrip(), after.strip())
    kind.__doc__ = "\n\n".join(part for part in parts if part) + "\n"


@cache
def describe_options(kind: Any) -> list[OptionDescription]:
    """The options of a strategy, which are the fields of a dataclass, in the order of
    `option_texts`.

    Raises:
        TypeError: `kind` is no dataclass.
        ConfigError: an annotation names what its module does not hold when it has been imported.
    """
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"the annotation of an option of {kind.__name__} names {error.name!r}, which"
            f" {kind.__module__} does not hold when it runs; import it there, and not under `if"
            " TYPE_CHECKING:` or inside a function, since options are checked by their annotations"
        ) from error
    texts = option_texts(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    order = [name for name in texts if name in fields]
    order += [name for name in fields if name not in texts]
    return [
        OptionDescription(
            of=kind,
            name=name,
            hint=hints[name],
            default=fields[name].default,
            meaning=re.sub(r"\s+", " ", texts.get(name, "")),
        )
        for name in order
    ]


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, on one line and without its full stop."""
    paragraph = inspect.cleandoc(docstring or "").split("\n\n", 1)[0]
    return re.sub(r"\s+", " ", paragraph).partition(". ")[0].removesuffix(".")
