"""Options as docstrings describe them. The text of each option stands once in the source, in the
`Args:` section of the dataclass that defines the field; subclasses show it too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ \t]+.*(?:\n|\Z)|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionDescription:
    """One option of a strategy.

    Attributes:
        name: its name.
        hint: its type, evaluated.
        default: its default, or `dataclasses.MISSING`.
        meaning: what its docstring says, on one line.
    """

    name: str
    hint: Any
    default: object
    meaning: str


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


def describe_options(kind: type) -> list[OptionDescription]:
    """The options of a strategy, which are the fields of a dataclass, in the order of
    `option_texts`.

    Raises:
        TypeError: `kind` is no dataclass.
    """
    hints, texts = typing.get_type_hints(kind, include_extras=True), option_texts(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    order = [name for name in texts if name in fields]
    order += [name for name in fields if name not in texts]
    return [
        OptionDescription(
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
