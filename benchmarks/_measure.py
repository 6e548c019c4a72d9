"""What the benchmarks share: pairs measured by turns, their ratio with a bootstrap interval, and
how cases are printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

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
    """

    case: str
    value: float
    unit: str
    goal: str
    holds: bool | Literal["undecided"]
    bound: float
    interval: tuple[float, float]


def ratio(
    case: str,
    pairs: Sequence[tuple[float, float]],
    *,
    bound: float,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Ratio:
    """The first members of `pairs` over the second ones, against one goal.

    Pairs are resampled whole, since what disturbs one member is likely to disturb the other.
    """
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


def main(cases: Callable[[], Iterable[Ratio]]) -> None:
    """Measure and print, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per case and line"
    )
    print_rows(cases(), as_json=parser.parse_args().json)
