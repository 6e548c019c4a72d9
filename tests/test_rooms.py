"""ARCHITECTURE.md says who may import whom; this holds its table, and names, against the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "offbeat"

SYSTEMS = frozenset({"averaging", "megabatch", "kfac"})
"""Rooms that hold one system each, with everything that belongs to it alone."""

FOR_ALL = {"errors", "torch_private"}
"""Files that every room may import, and that import no room."""

MAY_OPEN = {"script", "session", "strategies", "errors", "lab"}
"""What the facade may import."""


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(tree: ast.Module) -> set[str]:
    """The rooms that a file imports from; "offbeat" stands for the facade, whose use
    `test_architecture.py` watches.
    """
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    ours = [name.split(".") for name in modules if name.partition(".")[0] == "offbeat"]
    return {parts[1] if len(parts) > 1 else "offbeat" for parts in ours}


def documented_rooms() -> dict[str, set[str]]:
    """The table of rooms in ARCHITECTURE.md: each room, and the rooms that it imports."""
    _, found, table = (ROOT / "ARCHITECTURE.md").read_text().partition("| room | what it does |")
    assert found, "ARCHITECTURE.md has lost its table of rooms"
    rows = [line.strip("|").split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    return {
        room.strip(" `/").removesuffix(".py"): {name.strip(" `") for name in imports.split(",")}
        - {""}
        for room, _, imports in rows
    }


def actual_rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        found[room] |= imported_rooms(ast.parse(path.read_text())) - {room, "offbeat", *FOR_ALL}
    return found


def test_each_room_imports_what_the_table_says_and_no_more() -> None:
    actual = actual_rooms()
    facade = actual.pop("__init__")
    assert facade <= MAY_OPEN
    assert not any(actual[name] for name in FOR_ALL)
    assert documented_rooms() == dict(actual)


def test_calls_flow_one_way() -> None:
    """`prepare` raises `CycleError`, which names the circle."""
    TopologicalSorter(documented_rooms()).prepare()


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_systems_do_not_import_each_other(system: str) -> None:
    assert actual_rooms()[system] & SYSTEMS == set()


def test_public_names_of_classes_are_unique() -> None:
    """One name means one thing in the whole package."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
