"""Runs every benchmark of this directory, one after the other, and prints their cases as one table.

    python benchmarks/run_all.py [NAME ...] [--json] [--long] [--quick] [--text FILE] [--images NPZ]

Those of many runs take up to an hour each and run only when they are named, or with `--long`. With
`--quick` they say no more than that they run. A goal that is missed is printed as missed; only a
benchmark that does not run to its end makes the exit status non-zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LONG = {"auto", "stragglers", "deaths", "memory", "parity", "prediction", "relatives", "uneven"}
READ_DATA = {"parity": ("images", "text")}
KNOW_QUICK = {"stragglers", "deaths", "uneven", "run_deaths"}
VERDICTS = {True: "[green]holds", False: "[red]missed", "undecided": "[yellow]undecided"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measured ratio, as a benchmark printed it. `holds` is "undecided" when the interval
    straddles the goal.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    goal: str
    holds: bool | Literal["undecided"]
    bound: str


class BenchmarkError(Exception):
    """A benchmark ended with an error, or printed what is no case."""


def run(script: Path, options: Sequence[str]) -> Iterator[Case]:
    """The cases of one benchmark, as soon as it prints them."""
    with subprocess.Popen(
        [sys.executable, script, "--json", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield parse(script.stem, line)
    if process.returncode != 0:
        raise BenchmarkError(f"{script.name} ended with status {process.returncode}")


def parse(benchmark: str, line: str) -> Case:
    """The case in one line of JSON. Fields beside those of `Case` (an interval, a device) are the
    benchmark's own.
    """
    try:
        row = json.loads(line)
        holds = row["holds"]
        if not (holds is True or holds is False or holds == "undecided"):
            raise ValueError(f"holds is {holds!r}")
        return Case(
            benchmark=benchmark,
            case=row["case"],
            value=float(row["value"]),
            unit=row["unit"],
            goal=str(row["goal"]),
            holds=holds,
            bound=str(row["bound"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(
            f"{benchmark} printed {line.strip()!r}, which is no case ({error!r})"
        ) from error


def table_of(cases: list[Case]) -> Table:
    table = Table(
        "benchmark",
        "case",
        "value",
        "goal",
        "",
        "bound",
        caption=f"{sum(c.holds is False for c in cases)} missed",
    )
    for case in cases:
        value = f"{case.value:.4g} {case.unit}"
        table.add_row(case.benchmark, case.case, value, case.goal, VERDICTS[case.holds], case.bound)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every benchmark and print one table.")
    scripts = {
        path.stem: path
        for path in sorted(HERE.glob("*.py"))
        if path.stem not in ("run_all", "pages") and path.name[0] != "_"
    }
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"only these: {', '.join(scripts)}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per case and line instead"
    )
    parser.add_argument("--long", action="store_true", help=f"also {', '.join(sorted(LONG))}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short runs where a benchmark has them; their figures mean nothing",
    )
    parser.add_argument("--text", help="text for parity")
    parser.add_argument("--images", help="npz file for parity")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(scripts):
        parser.error(
            f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(scripts)}"
        )
    cases: list[Case] = []
    failed: list[str] = []
    for name in arguments.names or [name for name in scripts if arguments.long or name not in LONG]:
        print(f"{name} ...", file=sys.stderr)
        quick = ["--quick"] if arguments.quick and name in KNOW_QUICK else []
        data = [
            part
            for key in READ_DATA.get(name, ())
            if (path := getattr(arguments, key))
            for part in (f"--{key}", path)
        ]
        try:
            cases.extend(run(scripts[name], quick + data))
        except BenchmarkError as error:
            failed.append(str(error))
    if arguments.json:
        print(
            *(json.dumps({name: getattr(case, name) for name in Case.__slots__}) for case in cases),
            sep="\n",
        )
    else:
        Console().print(table_of(cases))
    for message in failed:
        print(message, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
