"""The sizes that ARCHITECTURE.md shows are those of the source."""

from __future__ import annotations

from pathlib import Path

import growth


def test_architecture_shows_how_large_the_project_is() -> None:
    page = growth.PAGE.read_text()
    _, found, rest = page.partition(growth.BEGIN)
    assert found, "ARCHITECTURE.md has lost its tables of sizes"
    shown = rest.partition(growth.END)[0].strip()
    assert shown == growth.tables(growth.shown_steps()), "run: python docs/growth.py --write"


def test_every_walked_step_is_shown() -> None:
    assert set(growth.shown_steps()) == set(growth.WALKED)


def test_only_code_counts(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""Prose.\n\nMore."""\n\n# a comment\nx = """text\nof code"""\n')
    assert growth.code_lines(path) == 2
