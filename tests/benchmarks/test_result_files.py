"""Figures go from benchmarks into files, and from there onto pages; none is typed."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import pages
from _measure import Ratio, present
from _results import (
    CASES,
    DIRECTORY,
    STUDIES,
    Figure,
    Origin,
    ResultFile,
    in_a_cell,
    rows_of,
    shown,
)

ORIGIN = Origin(recorded="0.1", command="python benchmarks/any.py", seeds=3)
RATIO = Ratio(
    case="left over right",
    value=2.0,
    unit="x",
    goal="at least 1",
    holds=True,
    bound=float("inf"),
    interval=(1.5, 2.5),
)


def figure(case: str, value: float | str | tuple[float | None, ...] | None) -> Figure:
    return Figure(case=case, table="speeds", column="fast", value=value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "any.jsonl"


@pytest.mark.parametrize("value", [1.5, "diverged", (0.5, None), None])
def test_a_figure_survives_its_file(path: Path, value: float) -> None:
    one = Figure(
        case="a", value=value, unit="ms", decimals=2, interval=(1.0, 2.0), holds=False, bound=0.5
    )
    ResultFile(path).replace("cell", [one], ORIGIN)

    (result,) = ResultFile(path).results

    assert (result.cell, result.figure, result.origin) == ("cell", one, ORIGIN)


def test_a_cell_that_is_measured_anew_takes_the_place_of_the_old_one(path: Path) -> None:
    kept = ResultFile(path)
    for cell in ("first", "second"):
        kept.replace(cell, [figure(cell, 1.0), figure(f"more of {cell}", 1.0)], ORIGIN)

    kept.replace("first", [figure("first", 2.0)], ORIGIN)

    found = [(result.cell, result.figure.value) for result in ResultFile(path).results]
    assert found == [("first", 2.0), ("second", 1.0), ("second", 1.0)]


def test_where_figures_come_from_is_said_once_before_them(path: Path) -> None:
    kept = ResultFile(path)
    kept.replace("first", [figure("a", 1.0), figure("b", 2.0)], ORIGIN)
    kept.replace("second", [figure("c", 3.0)], ORIGIN)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("cell", row.get("case")) for row in rows] == ["first", "a", "b", "second", "c"]
    assert ["command" in row for row in rows] == [True, False, False, True, False]


def test_a_line_may_be_a_figure_with_its_origin(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"cell": "x", "recorded": "1", "case": "a", "table": "t", "value": 1.0}\n')
    (result,) = ResultFile(path).results
    assert (result.cell, result.origin) == ("x", Origin(recorded="1"))
    assert (result.figure.case, result.figure.value) == ("a", 1.0)


class Counted:
    """A benchmark of two cells that counts how often each is measured, and may be stopped."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.stops_in = ""

    def cell(self, name: str) -> Iterator[Ratio | Figure]:
        self.measured.append(name)
        yield RATIO
        if self.stops_in == name:
            raise KeyboardInterrupt
        yield figure(name, 1.0)

    def run(self, directory: Path, *, again: bool = False) -> None:
        asked = Namespace(json=True, results=directory, again=again)
        present({name: lambda name=name: self.cell(name) for name in "ab"}, asked)


def test_a_benchmark_that_was_stopped_goes_on_with_the_cell_it_was_stopped_in(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["any.py"])
    benchmark = Counted()
    benchmark.stops_in = "b"
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(path.parent)
    benchmark.stops_in = ""

    benchmark.run(path.parent)

    assert benchmark.measured == ["a", "b", "b"]
    assert ResultFile(path).cells == {"a", "b"}


def test_cells_that_are_there_are_measured_again_if_that_is_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["any.py"])
    benchmark = Counted()
    for again in (False, False, True):
        benchmark.run(path.parent, again=again)

    assert benchmark.measured == ["a", "b", "a", "b"]


def test_standard_output_has_the_ratios_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["any.py"])
    Counted().run(path.parent)

    printed = [json.loads(line)["case"] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["left over right"] * 2


def test_a_file_names_the_command_without_directories_and_output(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "mnist.npz"
    data.touch()
    monkeypatch.setattr(
        sys, "argv", ["any.py", "--mnist", str(data), "--results", str(path.parent), "--json"]
    )
    Counted().run(path.parent)

    commands = {result.origin.command for result in ResultFile(path).results}
    assert commands == {"python benchmarks/any.py --mnist mnist.npz"}


def test_figures_of_a_quick_run_are_not_kept(path: Path) -> None:
    with pytest.raises(SystemExit, match="mean nothing"):
        present({}, Namespace(json=True, results=path.parent, again=False, quick=True))


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (figure("a", 0.98765), "0.988"),
        (figure("a", 123456.7), "123,457"),
        (figure("a", (0.5, None)), "0.5 none"),
        (figure("a", "diverged"), "diverged"),
        (figure("a", None), ""),
        (Figure(case="a", value=44.0, unit="%", decimals=0), "44%"),
        (Figure(case="a", value=1.5, unit="ms", decimals=2), "1.50 ms"),
    ],
)
def test_values_are_shown_as_people_write_them(one: Figure, text: str) -> None:
    assert shown(one) == text


def test_a_cell_says_all_that_is_known() -> None:
    one = Figure(
        case="a", column="b", value=1.69, interval=(1.62, 1.72), goal="at least 1.25", holds=True
    )

    assert in_a_cell(one) == "1.69 (1.62 to 1.72); goal at least 1.25: holds"


def test_a_case_without_a_figure_leaves_its_column_empty() -> None:
    first = Figure(case="a", column="x", value=1.0)
    second = Figure(case="b", column="y", value=2.0)

    assert list(rows_of([first, second])) == [["", "x", "y"], ["a", "1", ""], ["b", "", "2"]]


def test_a_table_without_columns_leaves_out_what_no_case_has() -> None:
    ratio = Figure(case="a", value=2.0, goal="at least 1", holds=True)

    assert list(rows_of([ratio])) == [
        ["case", "value", "goal"],
        ["a", "2", "at least 1: holds"],
    ]


def test_tables_are_as_the_result_files_have_them() -> None:
    old = [page.stem for page in pages.pages() if pages.written(page) != page.read_text()]
    assert old == [], "run python benchmarks/pages.py"
    assert pages.PICTURE.read_text() == pages.picture(), "run python benchmarks/pages.py"


def test_every_goal_is_shown_on_a_page() -> None:
    """One that is missed cannot be left out."""
    results = sorted(path.stem for path in DIRECTORY.glob("*.jsonl"))
    assert {name: hidden for name in results if (hidden := pages.hidden(name))} == {}


def test_no_figure_has_a_verdict_without_a_goal() -> None:
    paths = [*DIRECTORY.glob("*.jsonl"), *STUDIES.glob("*.jsonl")]
    judged = [result for path in paths for result in ResultFile(path).results]
    assert [one for one in judged if one.figure.holds is not None and not one.figure.goal] == []


def scripts_in(directory: Path) -> set[str]:
    return {
        path.stem
        for path in directory.glob("*.py")
        if path.name[0] != "_" and path.stem not in ("pages", "run_all")
    }


def test_every_benchmark_has_results_and_every_page_a_benchmark() -> None:
    scripts = scripts_in(DIRECTORY.parent)
    # The fault matrix is run by tests/chaos_support, and docs/faults.md shows it.
    assert {path.stem for path in DIRECTORY.glob("*.jsonl")} - {"chaos"} == scripts
    assert {path.stem for path in pages.PAGES.glob("*.md")} - {"index"} <= scripts


def test_every_study_has_results_and_a_paragraph() -> None:
    scripts = scripts_in(STUDIES.parent)
    assert {path.stem for path in STUDIES.glob("*.jsonl")} == scripts
    told = (STUDIES.parent / "README.md").read_text()
    assert [name for name in sorted(scripts) if f"## {name}\n" not in told] == []


def test_no_page_of_a_benchmark_has_more_than_600_words_of_prose() -> None:
    def words(page: Path) -> int:
        text = re.sub(
            r"^<!-- (table: |list ).*?<!-- end of table -->",
            "",
            page.read_text(),
            flags=re.M | re.S,
        )
        return len(text.split())

    assert {page.name: words(page) for page in pages.PAGES.glob("*.md") if words(page) > 600} == {}


def test_the_last_column_of_a_table_comes_from_a_result_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "DIRECTORY", path.parent)
    ResultFile(path).replace("cell", [figure("Fast", "two thirds")], ORIGIN)
    page = path.parent / "page.md"
    rows = (
        "| | what | speed |\n|---|---|---|\n| [`Fast`](a.md) | a | old |\n| [`Slow`](b.md) | b | |"
    )
    page.write_text(f"<!-- last column: any/speeds -->\n{rows}\n<!-- end of table -->\n")

    lines = pages.written(page).splitlines()

    assert lines[3:5] == ["| [`Fast`](a.md) | a | two thirds |", "| [`Slow`](b.md) | b |  |"]


def test_an_origin_is_not_said_again_below_the_next_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "DIRECTORY", path.parent)
    kept = ResultFile(path)
    for title in ("first", "second"):
        kept.replace(title, [Figure(case="a", table=title, value=1.0)], ORIGIN)
    kept.replace("third", [Figure(case="a", table="third", value=1.0)], Origin(recorded="0.2"))
    page = path.parent / "any.md"
    page.write_text(
        "".join(
            f"<!-- table: {title} -->\n<!-- end of table -->\n"
            for title in ("first", "second", "third")
        )
    )

    text = pages.written(page)

    assert text.count("python benchmarks/any.py") == 1
    assert "offbeat 0.2" in text


@pytest.mark.parametrize("title", ["nothing", "links/no/thing"])
def test_a_page_that_asks_for_a_table_nobody_has_is_an_error(tmp_path: Path, title: str) -> None:
    page = tmp_path / "links.md"
    page.write_text(f"<!-- table: {title} -->\n<!-- end of table -->\n")

    with pytest.raises(pages.PageError, match=r"links/no"):
        pages.written(page)


def test_the_name_of_a_table_may_have_a_slash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DIRECTORY", path.parent)
    ResultFile(path).replace("cell", [Figure(case="a", table="mine/yours", value=1.0)], ORIGIN)
    page = path.parent / "page.md"
    page.write_text("<!-- table: any/mine/yours -->\n<!-- end of table -->\n")

    assert "| a | 1 |" in pages.written(page)


def test_a_table_without_a_name_of_its_own_holds_what_has_a_goal() -> None:
    assert Figure(case="a", value=1.0).table == CASES
