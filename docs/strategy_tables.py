"""Writes the tables of strategies and of their options in `docs`, from the registry and from the
docstrings of the strategies.

    python docs/strategy_tables.py [--check]

A page says where a table belongs, and everything between the two marks is written here:

    <!-- options of topk -->           <!-- list of strategies -->
    <!-- end of options -->            <!-- end of list -->

`<!-- options of gtopk beside topk -->` leaves out options that the other strategy has alike, and
names them. `<!-- objects of localsgd -->` is a table of the objects that options take by name. With
`--check` nothing is written, and the exit status says whether a page is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import offbeat
from offbeat.codec.described_options import OptionDescription, describe_options
from offbeat.codec.topk_codec import SELECTORS
from offbeat.strategies import REGISTRY

DOCS = Path(__file__).parent
OBJECTS = {"curvature": offbeat.Curvature}
"""What is an option itself, and has options of its own."""

_OPTIONS = re.compile(
    r"<!-- options of (\w+)(?: beside (\w+))? -->\n.*?<!-- end of options -->", re.DOTALL
)
_SELECTORS = re.compile(r"<!-- selectors -->\n.*?<!-- end of selectors -->", re.DOTALL)
_OBJECTS = re.compile(r"<!-- objects of (\w+) -->\n.*?<!-- end of objects -->", re.DOTALL)
_LIST = re.compile(r"<!-- list of strategies -->\n.*?<!-- end of list -->", re.DOTALL)


def pages() -> list[Path]:
    """The pages that have such tables."""
    return [DOCS / "strategies.md", *(DOCS / "methods" / f"{name}.md" for name in REGISTRY)]


def written(page: Path) -> str:
    """The text of `page` with its tables as they should be."""

    def options(mark: re.Match[str]) -> str:
        opening = mark[0].partition("\n")[0]
        lines = "\n".join(_options(mark[1], mark[2]))
        return f"{opening}\n\n{lines}\n\n<!-- end of options -->"

    def objects(mark: re.Match[str]) -> str:
        lines = "\n".join(_object_rows(mark[1]))
        return f"<!-- objects of {mark[1]} -->\n\n{lines}\n\n<!-- end of objects -->"

    rows = "\n".join(_strategy_rows())
    text = _OBJECTS.sub(objects, _OPTIONS.sub(options, page.read_text()))
    selectors = "\n".join(_selector_rows())
    selectors = f"<!-- selectors -->\n\n{selectors}\n\n<!-- end of selectors -->"
    text = _SELECTORS.sub(lambda mark: selectors, text)
    listing = f"<!-- list of strategies -->\n\n{rows}\n\n<!-- end of list -->"
    return _LIST.sub(lambda mark: listing, text)


def beside(page: Path) -> str | None:
    """The strategy whose options a page does not repeat."""
    mark = _OPTIONS.search(page.read_text())
    return mark[2] if mark else None


def _options(name: str, other: str | None) -> Iterator[str]:
    rows = _option_rows(name)
    elsewhere = _option_rows(other) if other else {}
    alike = [option for option, row in rows.items() if elsewhere.get(option) == row]
    own = [row for option, row in rows.items() if option not in alike]
    if own:
        yield "| option | allowed | default | meaning |"
        yield "|---|---|---|---|"
        yield from own
    if other and alike:
        entry = REGISTRY.entries[other]
        names = ", ".join(f"`{option}`" for option in alike)
        if own:
            yield ""
        link = f"[`{entry.class_name}`]({other}.md#options)"
        told = f"{link} has these options, too: {names}." if own else f"Those of {link}: {names}."
        yield from textwrap.wrap(told, 100, break_on_hyphens=False)


def _option_rows(name: str) -> dict[str, str]:
    return {
        option.name: _option_row(option)
        for option in describe_options(OBJECTS.get(name) or REGISTRY[name])
    }


def _option_row(option: OptionDescription) -> str:
    required = option.default is dataclasses.MISSING
    default = "required" if required else f"`{_literal(option.default)}`"
    cells = f"`{option.name}`", _allowed(option.hint), default, option.meaning
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _selector_rows() -> Iterator[str]:
    yield "| selector | what it picks |"
    yield "|---|---|"
    for name, selector in SELECTORS.items():
        description = " ".join((selector.__doc__ or "").split())
        yield f'| `"{name}"` | {description} |'


def _object_rows(name: str) -> Iterator[str]:
    yield "| option | name | what it is |"
    yield "|---|---|---|"
    for option in describe_options(REGISTRY[name]):
        names: dict[str, list[str]] = {}
        for hint in typing.get_args(option.hint):
            named = typing.get_args(hint)[-1] if typing.get_origin(hint) is Annotated else {}
            for key in named if isinstance(named, Mapping) else ():
                text = re.sub(r"\s+", " ", (inspect.getdoc(named[key]) or "").split("\n\n", 1)[0])
                names.setdefault(text, []).append(f'`"{key}"`')
        for text, keys in names.items():
            yield f"| `{option.name}` | {', '.join(keys)} | {text} |"


def _strategy_rows() -> Iterator[str]:
    yield "| class | command line | what it does |"
    yield "|---|---|---|"
    for family, entries in REGISTRY.families.items():
        yield f"| **{family}** | | |"
        for entry in entries:
            page = f"[`{entry.class_name}`](methods/{entry.name}.md#options)"
            yield f"| {page} | `{entry.name}` | {entry.summary} |"


def _allowed(hint: object) -> str:
    """A type as Python users write its values."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{_literal(value)}`" for value in typing.get_args(hint))
    if hint is type(None):
        return "`None`"
    if typing.get_origin(hint) is Annotated:
        kind, limit = typing.get_args(hint)
        is_table = isinstance(limit, Mapping)
        return ", ".join(f'`"{name}"`' for name in limit) if is_table else _allowed(kind)
    if (kind := typing.get_origin(hint)) in (tuple, Mapping):
        return f"a {kind.__name__.lower()}"
    if hint is bool:
        return "`True`, `False`"
    if inspect.isclass(hint):
        return f"`{hint.__name__}`"
    if "Callable" in str(typing.get_origin(hint)):
        return "a callable"
    return ", ".join(_allowed(part) for part in typing.get_args(hint))


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [page for page in pages() if written(page) != page.read_text()]
    for page in stale:
        print(("out of date: " if check else "written: ") + str(page.relative_to(DOCS.parent)))
        if not check:
            page.write_text(written(page))
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
