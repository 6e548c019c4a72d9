"""What the benchmarks share: pairs measured by turns, their ratio with a bootstrap interval, and
how figures are printed and kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import offbeat
from _results import CASES, Figure, Origin, ResultFile, rows_of
from offbeat.run.interrupts import exit_at_stop_signals

VERDICTS = {True: "holds", False: "missed", "undecided": "undecided"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A measured ratio against its goal.

    Attributes:
        case: what was compared.
        value: ratio of the medians.
        unit: "x".
        goal: such as "at most 2.5".
        holds: whether the goal is met; "undecided" when the interval straddles it.
        bound: the best that physics or arithmetic allow.
        interval: of `value`, 95%.
        table: the table of the benchmark's page that shows it.
    """

    case: str
    value: float
    unit: str
    goal: str
    holds: bool | Literal["undecided"]
    bound: float
    interval: tuple[float, float]
    table: str = CASES


def ratio(
    case: str,
    pairs: Sequence[tuple[float, float]],
    *,
    bound: float,
    at_most: float | None = None,
    at_least: float | None = None,
    table: str = CASES,
) -> Ratio:
    """The first members of `pairs` over the second ones, against one goal.

    Pairs are resampled whole, since what disturbs one member is likely to disturb the other.
    """
    from scipy.stats import bootstrap  # late, since it takes a second and tests import this module

    first, second = np.array(pairs).T
    resampled = bootstrap(
        (first, second),
        _ratio_of_medians,
        paired=True,
        method="percentile",
        n_resamples=2000,
        rng=0,
    )
    low, high = (float(end) for end in resampled.confidence_interval)
    if at_most is not None and at_least is None:
        limit, goal, met = at_most, f"at most {at_most:g}", high <= at_most
    elif at_least is not None and at_most is None:
        limit, goal, met = at_least, f"at least {at_least:g}", low >= at_least
    else:
        raise ValueError(
            f"a case has one goal, got at_most={at_most} and at_least={at_least}; pass either of"
            " them"
        )
    return Ratio(
        case=case,
        value=float(_ratio_of_medians(first, second)),
        unit="x",
        goal=goal,
        holds="undecided" if low < limit < high else met,
        bound=bound,
        interval=(low, high),
        table=table,
    )


def _ratio_of_medians(
    first: NDArray[np.float64], second: NDArray[np.float64], axis: int = -1
) -> NDArray[np.float64] | np.float64:
    return np.median(first, axis=axis) / np.median(second, axis=axis)


def interleave(
    measured: Mapping[str, Callable[[], float]], *, num_rounds: int
) -> dict[str, list[float]]:
    """Run all in turn, each round in the opposite order of the last, after a first round that does
    not count.

    Args:
        measured: by name, functions that return the seconds they took.
        num_rounds: how many results of each to return.
    """
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    names = list(measured)
    for _ in range(num_rounds + 1):
        for name in names:
            seconds[name].append(measured[name]())
        names.reverse()
    return {name: durations[1:] for name, durations in seconds.items()}


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin_s = time.perf_counter()
    function()
    return time.perf_counter() - begin_s


Row: TypeAlias = Ratio | Figure
"""What a benchmark finds: a ratio with its goal, or one more figure of a table."""
Cells: TypeAlias = Mapping[str, Callable[[], Iterable[Row]]]
"""By name, what is measured in one go."""


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per case and line"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="also keep all figures in DIR/NAME.jsonl, cell by cell; cells that are there are"
        " skipped, so that a benchmark which was stopped goes on",
    )
    parser.add_argument(
        "--again", action="store_true", help="with --results: measure cells that are there anew"
    )


def present(cells: Cells, asked: argparse.Namespace, *, seeds: int | None = None) -> None:
    """Measure the cells, and print and keep what they find as `add_output_options` has asked.

    Args:
        cells: by name, what to measure.
        asked: the command line.
        seeds: how many runs stand behind each figure, if the benchmark has seeds.
    """
    exit_at_stop_signals()  # so that links and processes are taken down
    if asked.results is not None and getattr(asked, "quick", False):
        raise SystemExit("figures of --quick mean nothing; leave out --quick or --results")
    kept = None if asked.results is None else ResultFile(asked.results / f"{_name()}.jsonl")
    print_rows(_measured(cells, kept, seeds, again=asked.again), as_json=asked.json)


def _measured(
    cells: Cells, kept: ResultFile | None, seeds: int | None, *, again: bool
) -> Iterator[Ratio]:
    for cell, measure in cells.items():
        if kept is not None and cell in kept.cells and not again:
            print(f"{cell}: is in {kept.path}; --again measures it anew", file=sys.stderr)
            continue
        rows: list[Row] = []
        for row in measure():
            rows.append(row)
            if isinstance(row, Ratio):
                yield row
        _tell([row for row in rows if isinstance(row, Figure)])
        if kept is not None:
            kept.replace(cell, map(figure_of, rows), origin(seeds))


def figure_of(row: Row) -> Figure:
    if isinstance(row, Figure):
        return row
    return Figure(
        case=row.case,
        table=row.table,
        value=row.value,
        unit=row.unit,
        interval=row.interval,
        goal=row.goal,
        holds=row.holds,
        bound=row.bound if np.isfinite(row.bound) else None,
    )


def origin(seeds: int | None) -> Origin:
    """This run of this benchmark."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        processor = models[0].partition(": ")[2] if models else processor
    gpus = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return Origin(
        recorded=offbeat.__version__,
        command=_command(),
        seeds=seeds,
        machine=", ".join([processor, f"{os.cpu_count()} cores", *gpus]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"python": platform.python_version(), "torch": version("torch")},
    )


def _name() -> str:
    return Path(sys.argv[0]).stem


def script_command() -> str:
    """How the script that runs is started from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    folder = "studies/" if script.parent.name == "studies" else ""
    return f"python benchmarks/{folder}{script.name}"


def _command() -> str:
    """The command line without what says where output goes, and without directories."""
    words, options = [script_command()], iter(sys.argv[1:])
    for option in options:
        if option == "--results":
            next(options, None)
        elif option not in ("--json", "--again") and not option.startswith("--results="):
            is_path = "/" in option and Path(option).exists()
            words.append(shlex.quote(Path(option).name if is_path else option))
    return " ".join(words)


def _tell(figures: Sequence[Figure]) -> None:
    """Print tables that have no goals to standard error."""
    for name in dict.fromkeys(figure.table for figure in figures):
        heading, *rows = rows_of([figure for figure in figures if figure.table == name])
        table = Table(*heading, title=name, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console(stderr=True, width=140).print(table)


def print_rows(rows: Iterable[Ratio], *, as_json: bool) -> None:
    """One JSON object a line, each as soon as it is there; or a table."""
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
        return
    table = Table("case", "value", "interval", "goal", "", "bound")
    for row in rows:
        low, high = row.interval
        value, interval = f"{row.value:.3g} {row.unit}", f"{low:.3g} to {high:.3g}"
        table.add_row(row.case, value, interval, row.goal, VERDICTS[row.holds], f"{row.bound:.3g}")
    Console().print(table)


def main(cells: Cells) -> None:
    """Measure and print, as the command line says, a benchmark without options of its own."""
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    present(cells, parser.parse_args())
