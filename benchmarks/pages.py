"""Writes the tables of figures in `docs` and in the README, and the README's picture, from the
files in `results`.

    python benchmarks/pages.py [--check]

A page says where a table belongs, and everything between the two marks is written here:

    <!-- table: NAME/TABLE -->
    <!-- end of table -->

On `docs/benchmarks/NAME.md` the mark may leave `NAME/` out, unless the table's own name begins with
a word and a slash. `<!-- list of benchmarks -->` asks for the table of all of them. The last column
of a table that people write otherwise is taken from the first column of another:

    <!-- last column: NAME/TABLE -->
    | [`Strategy`](...) | ... | is written here |
    <!-- end of table -->

Results of studies stand in `studies/results`. With `--check` nothing is written, and the exit
status says whether a page is out of date.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from _results import (
    DIRECTORY,
    STUDIES,
    Origin,
    Result,
    ResultFile,
    rows_of,
    shown,
    tables_of,
)

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "benchmarks"
WIDTH = 100
_END = "<!-- end of table -->"
_TABLE = re.compile(r"<!-- table: (?:(\w+)/)?([^\n]+?) -->\n.*?" + _END, re.DOTALL)
_COLUMN = re.compile(r"<!-- last column: (\w+)/([^\n]+?) -->\n.*?" + _END, re.DOTALL)
_ROW = re.compile(r"^(\| \[`(\w+)`\].* \|) ?([^|]*)\|$", re.MULTILINE)
_LIST = re.compile(r"<!-- list of benchmarks -->\n.*?" + _END, re.DOTALL)
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)

PICTURE = ROOT / "docs" / "pictures" / "speed.svg"
_SPEEDS = "how many times faster gTop-k's steps are"
_INK, _COLOURS = "#7d8590", ("#2f81f7", "#2da36b")


class PageError(Exception):
    """A page asks for a table that no result file has."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(page: Path) -> str:
    """The page with its tables as the result files have them now.

    Raises:
        PageError: a mark names a table that does not exist.
    """
    told: set[str] = set()

    def table(mark: re.Match[str]) -> str:
        name, title = mark[1] or page.stem, mark[2]
        results = tables_of(_results(name)).get(title)
        if results is None:
            raise PageError(f"{page.name} asks for {name}/{title}, which no result file has")
        opening = mark[0].partition("\n")[0]
        # What tables above say of commands, or of the machine, need not be said again.
        lines = [*_commands(results, told), *_machines(results, told)]
        for result in results:
            told.update((_measured_by(result.origin), _measured_on(result.origin)))
        below = [line for text in lines for line in _wrapped(f"- {text}", "  ")]
        return "\n".join([opening, *_table(results), "", *below, *[""] * bool(below), _END])

    def column(mark: re.Match[str]) -> str:
        results = tables_of(_results(mark[1])).get(mark[2], [])
        told = {result.figure.case: shown(result.figure) for result in results}
        return _ROW.sub(lambda row: f"{row[1]} {told.get(row[2], '')} |", mark[0])

    text = _COLUMN.sub(column, _TABLE.sub(table, page.read_text()))
    return _LIST.sub(lambda mark: "\n".join([mark[0].partition("\n")[0], *_list(), _END]), text)


def picture() -> str:
    """README's figures as bars, in colours that are read on white and on black. A bar's length is
    logarithmic, since one link's are ten times those of the other.
    """
    results = tables_of(_results("links"))[_SPEEDS]
    columns = list(dict.fromkeys(result.figure.column for result in results))
    lines, y = [], 0
    for case in _cases(results):
        y += 22
        lines.append(f'<text x="0" y="{y}" fill="{_INK}">{case}</text>')
        for column, colour in zip(columns, _COLOURS, strict=True):
            (figure,) = [
                one.figure
                for one in results
                if (one.figure.case, one.figure.column) == (case, column)
            ]
            y += 20
            assert isinstance(figure.value, float)
            length = 100 * math.log10(figure.value) + 4
            lines += [
                f'<rect y="{y - 12}" width="{length:.0f}" height="14" rx="2" fill="{colour}"/>',
                f'<text x="{length + 8:.0f}" y="{y}" fill="{colour}">{figure.value:.3g} times, '
                f"{column}</text>",
            ]
    title = "How many times faster gTop-k's steps are than those of DDP and its hooks"
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 {y + 10}" width="420"'
    opening = [f'<svg {head} font-family="sans-serif" font-size="13">', f"<title>{title}</title>"]
    return "\n".join([*opening, *lines, "</svg>", ""])


def hidden(name: str) -> list[str]:
    """The tables with a goal, of a result file, that no page shows."""
    asked_for = {
        (mark[1] or page.stem, mark[2])
        for page in pages()
        for kind in (_TABLE, _COLUMN)
        for mark in kind.finditer(page.read_text())
    }
    return [
        title
        for title, results in tables_of(_results(name)).items()
        if (name, title) not in asked_for and any(result.figure.goal for result in results)
    ]


def _results(name: str) -> list[Result]:
    """Of a benchmark, or of a study."""
    living = DIRECTORY / f"{name}.jsonl"
    return ResultFile(living if living.exists() else STUDIES / living.name).results


def _table(results: Sequence[Result]) -> Iterator[str]:
    yield from _markdown(rows_of([result.figure for result in results]))


def _markdown(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for place, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if place == 0:
            yield "|---" * len(row) + "|"


def _commands(results: Sequence[Result], told: Collection[str]) -> list[str]:
    """What measured which rows of a table, but for what is `told` already."""
    numbers = {case: place for place, case in enumerate(_cases(results), start=1)}
    rows: dict[str, set[int]] = {}
    for result in results:
        rows.setdefault(_measured_by(result.origin), set()).add(numbers[result.figure.case])
    if len(rows) == 1:
        return [way for way in rows if way not in told]
    return [
        f"{'Row' if len(those) == 1 else 'Rows'} {_ranges(sorted(those))}: {way}"
        for way, those in rows.items()
        if way not in told
    ]


def _machines(results: Sequence[Result], told: Collection[str]) -> list[str]:
    """What a table was measured on, and when, but for what is `told` already."""
    dates: dict[str, list[str]] = {}
    for origin in (result.origin for result in results):
        if _measured_on(origin) not in told:
            dates.setdefault(_measured_on(replace(origin, date="")), []).append(origin.date)
    return [
        ", ".join(filter(None, (machine, " and ".join(sorted({*those} - {""}))))) + "."
        for machine, those in dates.items()
    ]


def _cases(results: Sequence[Result]) -> list[str]:
    """What the rows of a table are called. Without columns each result has a row of its own."""
    return list(dict.fromkeys(result.figure.case for result in results))


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 as "1 to 3, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{span[0]} to {span[-1]}" if span[1:] else str(span[0]) for span in spans)


def _measured_by(origin: Origin) -> str:
    how = [f"`{origin.command}`" if origin.command else "An observation that no command repeats"]
    if origin.seeds:
        how.append(f"{origin.seeds} seed{'s' * (origin.seeds != 1)}")
    return ", ".join(how) + "." + (f" {origin.note}" if origin.note else "")


def _measured_on(origin: Origin) -> str:
    versions = (f"{name} {version}" for name, version in origin.versions.items())
    parts = [f"offbeat {origin.recorded}", *versions, origin.machine, origin.date]
    return ", ".join(filter(None, parts))


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most `WIDTH` characters; what stands in backticks stays on one line."""
    glued = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        glued, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def _list() -> Iterator[str]:
    """All benchmarks with what they ask, and how many goals hold."""
    rows = [["benchmark", "measures", "goals that hold", "missed", "undecided"]]
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        names = dict.fromkeys(mark[1] or page.stem for mark in _TABLE.finditer(text))
        figures = [result.figure for name in names for result in _results(name)]
        if not figures:
            continue
        title = _TITLE.search(text)
        assert title is not None, f"{page.name} has no title"
        counts = [sum(figure.holds is kind for figure in figures) for kind in (True, False)]
        counts.append(sum(figure.holds == "undecided" for figure in figures))
        measures = title[1].partition(": ")[2]
        rows.append([f"[{page.stem}]({page.name})", measures, *map(str, counts)])
    yield from _markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of the benchmarks' pages.")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check = parser.parse_args().check
    now = {page: written(page) for page in pages()} | {PICTURE: picture()}
    stale = [page for page, text in now.items() if not page.exists() or text != page.read_text()]
    for page in stale:
        name = page.relative_to(ROOT)
        if check:
            print(f"{name} is out of date; run python benchmarks/pages.py", file=sys.stderr)
        else:
            page.write_text(now[page])
            print(f"wrote {name}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
