"""Runs the matrix, cell by cell, into `benchmarks/results/chaos.jsonl`, and writes `docs/faults.md`
anew. A cell that is there is skipped, so a run that was stopped goes on.

    make chaos
    PYTHONPATH=tests:benchmarks python -m chaos_support --only killed/,WAGMA --again
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from _measure import origin
from _results import DIRECTORY, Figure, Origin, Result, ResultFile
from chaos_support.matrix import FAULTS, OF_ISLANDS, ON_ISLANDS, STRATEGIES, Cell
from chaos_support.play import Outcome, Stage
from offbeat_lab.emulation.commands import MissingMeansError

RESULTS = DIRECTORY / "chaos.jsonl"
SYNCHRONOUS = "strategies that end with a death"
SURVIVING = "strategies that go on"
ISLANDS = "2 islands of 2 ranks"


def grid(limit_s: float, seed: int) -> list[Cell]:
    """All pairs on 3 ranks, those that cut links behind links and all others on loopback; on 5
    ranks, for each fault, one strategy of each kind, on loopback or behind links, as drawn; and 2
    islands of 2 ranks.
    """
    make = partial(Cell, limit_s=limit_s, seed=seed)
    pairs = [
        make(strategy=strategy, fault=name, links=fault.needs_links)
        for name, fault in FAULTS.items()
        for strategy in STRATEGIES
    ]
    draws = random.Random(seed)
    kinds = [[s for s in STRATEGIES if survives(s) is kind] for kind in (False, True)]
    islands = [
        make(strategy=strategy, fault=name, ranks=4, shards=2, links=FAULTS[name].needs_links)
        for name in ON_ISLANDS
        for strategy in OF_ISLANDS
    ]
    drawn = [
        make(
            strategy=draws.choice(kind),
            fault=name,
            ranks=5,
            links=fault.needs_links or draws.random() < 0.5,
        )
        for name, fault in FAULTS.items()
        for kind in kinds
    ]
    return [*pairs, *drawn, *islands]


def survives(strategy: str) -> bool:
    return STRATEGIES[strategy].strategy.survives_death


def figure(cell: Cell, outcome: Outcome) -> Figure:
    kind = SURVIVING if survives(cell.strategy) else SYNCHRONOUS
    title = FAULTS[cell.fault].title
    if cell.shards > 1:
        what = f"{'a shard' if cell.fault == 'killed' else 'an island'}: {title}"
        case = f"{what}: {outcome.promise}"
        return Figure(case=case, table=ISLANDS, column=cell.strategy, value=str(outcome))
    if cell.ranks == 3:
        case = f"{title}: {outcome.promise}"
        return Figure(case=case, table=kind, column=cell.strategy, value=str(outcome))
    how = f"{cell.strategy}, behind links" if cell.links else cell.strategy
    value = f"{how}: {outcome}; promised: {outcome.promise}"
    return Figure(case=title, table="drawn, 5 ranks", column=kind, value=value)


def in_short(results: Iterable[Result]) -> Iterator[Figure]:
    """For each fault, how many strategies kept their promise, and in what time the slowest."""
    outcomes: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        figure = result.figure
        if figure.table in (SYNCHRONOUS, SURVIVING):
            title, _, promise = figure.case.partition(": ")
            outcomes.setdefault((title, figure.table, promise), []).append(str(figure.value))
    for (title, kind, promise), told in outcomes.items():
        kept = sum("**" not in outcome for outcome in told)
        slowest_s = max(float(found) for text in told for found in re.findall(r"([\d.]+) s", text))
        value = f"{promise}: {kept}/{len(told)}, {slowest_s:.1f} s"
        shown = value if kept == len(told) else f"**{value}**"
        yield Figure(case=title, table="in short", column=kind, value=shown)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the fault matrix.")
    parser.add_argument(
        "--only", default="", help="by commas: strategies, or beginnings of the names of cells"
    )
    parser.add_argument("--limit-s", type=float, default=3.0, help="the limit of silence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="also cells that are there")
    parser.add_argument("--wrong", action="store_true", help="again those that broke a promise")
    parser.add_argument("--time-s", type=float, default=float("inf"), help="begin none after it")
    parser.add_argument("--keep", type=Path, help="where logs are kept; by default nowhere")
    parser.add_argument("--at-once", type=int, default=2, help="cells; they mostly wait")
    parser.add_argument("--dry", action="store_true", help="write no results")
    asked = parser.parse_args()
    results = ResultFile(RESULTS)
    broken = {result.cell for result in results.results if "**" in str(result.figure.value)}
    parts = asked.only.split(",")
    cells = [
        cell
        for cell in grid(asked.limit_s, asked.seed)
        if any(cell.name.startswith(part) or part == cell.strategy for part in parts)
        and (asked.again or cell.name not in results.cells or (asked.wrong and cell.name in broken))
    ]
    cells.sort(key=lambda cell: cell.links)  # those behind links take longer to set up
    with tempfile.TemporaryDirectory() as temporary, Stage(asked.keep or Path(temporary)) as stage:
        run = Run(stage, None if asked.dry else results, asked.time_s)
        with ThreadPoolExecutor(asked.at_once) as pool:
            try:
                played = sum(pool.map(run.play, cells))
            except BaseException:
                run.end_s = 0.0  # such as Ctrl-C: cells under way are played to their end
                raise
    if results.results and not asked.dry:
        last = results.results[0].origin
        results.replace("in short", [*in_short(results.results)], last)
        results.sort([cell.name for cell in grid(asked.limit_s, asked.seed)])
    print(f"{played} of {len(cells)} cells were run", file=sys.stderr)


class Run:
    """Plays cells on a stage, and keeps what they show in `results`; begins none after `time_s`."""

    def __init__(self, stage: Stage, results: ResultFile | None, time_s: float) -> None:
        self._stage = stage
        self._results = results
        self.end_s = time.monotonic() + time_s
        self._lock = threading.Lock()
        self._origin = origin(None)

    def play(self, cell: Cell) -> bool:
        """Returns whether the cell was run."""
        begin_s = time.monotonic()
        if begin_s > self.end_s:
            return False
        try:
            outcome = self._stage.play(cell)
        except MissingMeansError as error:
            print(f"{cell.name}: not run, {error}", file=sys.stderr)
            return False
        took = f"{time.monotonic() - begin_s:.1f} s"
        with self._lock:
            print(f"{cell.name}: {outcome} (promised: {outcome.promise}; {took})", flush=True)
            if self._results is not None:
                whence = _origin(self._origin, cell)
                self._results.replace(cell.name, [figure(cell, outcome)], whence)
        return True


def _origin(whence: Origin, cell: Cell) -> Origin:
    return Origin(
        recorded=whence.recorded,
        command="make chaos",
        machine=whence.machine,
        date=whence.date,
        versions=whence.versions,
        note=f"The limit of silence is {cell.limit_s:g} s, the seed {cell.seed}.",
    )


if __name__ == "__main__":
    main()
