"""Result files, `results/NAME.jsonl`: lines of JSON, one that says where figures come from, and one
for each of these figures. `pages.py` makes the tables of `docs` from them. This module needs
Python's standard library alone.

A benchmark measures in cells, such as one task or one speed of the link. A cell's figures are
written together when it is over, so a benchmark that was stopped goes on with the next cell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

DIRECTORY = Path(__file__).parent / "results"
STUDIES = Path(__file__).parent / "studies" / "results"
"""Of what was asked once."""
CASES = "cases"
"""The table of those figures that have a goal and stand alone in their row."""

Value: TypeAlias = float | str | tuple[float | None, ...] | None
Verdict: TypeAlias = bool | Literal["undecided"] | None
_WORDS = {True: "holds", False: "**missed**", "undecided": "*undecided*", None: ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of a table.

    Attributes:
        case: its row.
        table: the table that it belongs to.
        column: its column. Where a table has no columns, each row shows one figure with its
            interval, goal, verdict and bound.
        value: a number; a tuple with one number a seed, None where a run has none; or words, such
            as "diverged".
        unit: "x" for a ratio.
        decimals: how many are shown; None: three significant digits.
        interval: of `value`.
        goal: such as "at most 2.5"; empty: there is none.
        holds: whether the goal is met; "undecided" when the interval has the limit inside; None:
            there is no goal, or nobody has analysed it.
        bound: the best that physics or arithmetic allow; None: unknown or infinite.
    """

    case: str
    table: str = CASES
    column: str = ""
    value: Value
    unit: str = ""
    decimals: int | None = None
    interval: tuple[float, float] | None = None
    goal: str = ""
    holds: Verdict = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a figure comes from.

    Attributes:
        recorded: the version of offbeat that was measured.
        command: what measures it; empty for an observation that no command repeats.
        seeds: how many runs stand behind it; None: the benchmark has no seeds.
        machine: processor and number of cores.
        date: as in "2026-11-22"; empty: not recorded.
        versions: of what matters besides, such as torch.
        note: what else has to be known, such as work beside the measurement.
    """

    recorded: str
    command: str = ""
    seeds: int | None = None
    machine: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A figure in a result file. `cell` names what is measured in one go."""

    cell: str
    figure: Figure
    origin: Origin


class ResultFile:
    """The figures of one benchmark, in the order in which tables show them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = list(_parsed(_lines(path)))

    @property
    def cells(self) -> set[str]:
        return {result.cell for result in self.results}

    def replace(self, cell: str, figures: Iterable[Figure], origin: Origin) -> None:
        """Put `figures` in the place of the cell's old ones, and write the file at once."""
        fresh = [Result(cell=cell, figure=figure, origin=origin) for figure in figures]
        old = [place for place, result in enumerate(self.results) if result.cell == cell]
        first = old[0] if old else len(self.results)
        kept = [result for result in self.results if result.cell != cell]
        self.results = [*kept[:first], *fresh, *kept[first:]]
        self._write()

    def sort(self, cells: Sequence[str]) -> None:
        """Bring cells into this order, and write the file; those that are not in `cells` come
        last.
        """
        places = {cell: place for place, cell in enumerate(cells)}
        self.results.sort(key=lambda result: places.get(result.cell, len(places)))
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A file that is replaced whole is never found half written by who goes on with it.
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in _written(self.results)))
        os.replace(draft, self.path)


def _lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines() if path.exists() else ()


def _written(results: Iterable[Result]) -> Iterator[str]:
    said = ""
    for result in results:
        origin = _line({"cell": result.cell, **asdict(result.origin)})
        if origin != said:
            yield origin
        yield _line(asdict(result.figure))
        said = origin


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in row.items() if value not in (None, "", {})})


def _parsed(lines: Iterable[str]) -> Iterator[Result]:
    """Results. A line with a cell holds for what follows; it may be that of a figure too."""
    cell, origin = "", Origin(recorded="")
    for line in lines:
        row: dict[str, Any] = json.loads(line)
        for key in ("value", "interval"):
            if isinstance(row.get(key), list):
                row[key] = tuple(row[key])
        of_figure = {name.name: row.pop(name.name) for name in fields(Figure) if name.name in row}
        if row:
            cell, origin = row.pop("cell"), Origin(**row)
        if of_figure:
            # A value that was None is not written.
            figure = Figure(**{"value": None, **of_figure})
            yield Result(cell=cell, figure=figure, origin=origin)


def number(value: float, decimals: int | None) -> str:
    """`value` as people write it: three significant digits, or so many decimals."""
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown(figure: Figure) -> str:
    """The value with its unit, as a table shows it."""
    value, unit = figure.value, figure.unit
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        text = " ".join("none" if one is None else number(one, figure.decimals) for one in value)
    else:
        text = number(value, figure.decimals)
    return text + (unit if unit == "%" else f" {unit}" if unit not in ("", "x") else "")


def shown_interval(figure: Figure) -> str:
    if figure.interval is None:
        return ""
    low, high = (number(end, figure.decimals) for end in figure.interval)
    return f"{low} to {high}"


def with_interval(figure: Figure) -> str:
    return shown(figure) + (f" ({shown_interval(figure)})" if figure.interval else "")


def verdict(figure: Figure) -> str:
    return _WORDS[figure.holds]


def in_a_cell(figure: Figure) -> str:
    """All that is known of a figure, for a table with columns."""
    parts = [with_interval(figure)]
    if figure.goal:
        parts.append(f"goal {figure.goal}: {verdict(figure) or 'not analysed'}")
    if figure.bound is not None:
        parts.append(f"bound {number(figure.bound, figure.decimals)}")
    return "; ".join(parts)


def tables_of(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by table, both in the order of the file."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.figure.table, []).append(result)
    return by_name


def rows_of(figures: Sequence[Figure]) -> Iterator[list[str]]:
    """The lines of a table, its heading first. Where a case has no figure for a column the cell is
    empty; a column that no case fills is left out.
    """
    if all(not figure.column for figure in figures):
        lines = [["case", "value", "goal", "bound"]]
        for figure in figures:
            bound = "" if figure.bound is None else number(figure.bound, figure.decimals)
            goal = ": ".join(filter(None, (figure.goal, verdict(figure))))
            lines.append([figure.case, with_interval(figure), goal, bound])
        used = [place for place in range(4) if place < 2 or any(line[place] for line in lines[1:])]
        yield from ([line[place] for place in used] for line in lines)
        return
    columns = list(dict.fromkeys(figure.column for figure in figures))
    cases: dict[str, dict[str, str]] = {}
    for figure in figures:
        cases.setdefault(figure.case, {})[figure.column] = in_a_cell(figure)
    yield ["", *columns]
    for case, by_column in cases.items():
        yield [case, *(by_column.get(column, "") for column in columns)]
