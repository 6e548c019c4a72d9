"""What the tables and bars of the page say, ready for the template: text, widths in percent, and
which mark stands where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat_lab.breakdown import Lateness
from offbeat_lab.comparison import Difference
from offbeat_lab.figures import (
    MEASURES,
    NOTHING,
    RATIO,
    SECONDS,
    SHARE,
    Better,
    Measure,
    capital,
    write,
    write_estimate,
)
from offbeat_lab.report.data import PageContent
from offbeat_lab.report.page_summary import SHORT, latenesses, median, slow_worker

_MANY_WORKERS, _LATEST = 16, 12

SHARES = {
    "compute": ("share_compute", "computing"),
    "encode": ("share_encode", "encoding"),
    "waiting": ("share_wait", "waiting for others"),
    "transfer": ("share_transfer", "transfer"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One figure: its median and interval as text, and whether it is the best beyond doubt, and
    whether some runs lack it: then `interval` says how many have it.
    """

    text: str
    interval: str = ""
    best: bool = False
    partial: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measure of all strategies. `note` says between whom there is no difference; `short` is
    its heading in the table of the main ones, and empty where it is none of them.
    """

    title: str
    cells: Sequence[Cell]
    note: str = ""
    short: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: its length in percent of the longest, its value, and its parts as (phase, percent,
    text).
    """

    label: str
    strategy: int
    percent: float
    text: str
    more: str = ""
    parts: Sequence[tuple[str, float, str]] = ()
    mark: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bars under a heading, with a sentence about them, and how many shorter ones were left out."""

    heading: str
    bars: Sequence[Bar]
    sentence: str = ""
    left_out: int = 0


def rows(report: PageContent) -> Iterator[Row]:
    """The table: a row for each measure that some strategy has."""
    for name, measure in MEASURES.items():
        known = any(median(strategy, name) is not None for strategy in report.strategies)
        if known and measure.better is not Better.NEITHER:
            yield _row(report, name, measure)


def difference_rows(report: PageContent) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Every comparison of two: measure, a, b, ratio, interval, and in words whether there is a
    difference.
    """
    for found in sorted(report.differences, key=lambda found: found.measure, reverse=True):
        measure = MEASURES.get(found.measure)
        title = _title(measure, report) if measure else found.measure
        ratio, interval, answer = write(found.ratio, RATIO), "", "not known: one run of each"
        if found.low is not None and found.high is not None:
            interval = f"{write(found.low, RATIO)} to {write(found.high, RATIO)}"
            answer = "none: within the spread"
        yield title, found.a, found.b, ratio, interval, "yes" if found.decided else answer


def step_bars(report: PageContent) -> Bars | None:
    """Where a step's time goes; None where no strategy says."""
    steps = [median(strategy, "step_s") for strategy in report.strategies]
    longest = max((step for step in steps if step), default=None)
    if longest is None:
        return None
    bars = []
    for number, (strategy, step_s) in enumerate(zip(report.strategies, steps, strict=True)):
        shares = {phase: median(strategy, name) for phase, (name, _) in SHARES.items()}
        known = {phase: share for phase, share in shares.items() if share is not None}
        if step_s is None or not known:
            continue
        whole = sum(known.values()) or 1.0
        parts = [
            (phase, 100 * share / whole, f"{SHARES[phase][1]} {write(share, SHARE)}")
            for phase, share in known.items()
        ]
        text = f"{write(step_s, SECONDS)} a step"
        bars.append(
            Bar(
                label=strategy.label,
                strategy=number,
                percent=100 * step_s / longest,
                text=text,
                parts=parts,
            )
        )
    return Bars(heading="Where the time of a step goes", bars=bars) if bars else None


def lateness_bars(report: PageContent) -> Iterator[Bars]:
    """How late each worker came, for every strategy that says; of many workers the latest."""
    slow = slow_worker(report)
    for strategy, late in latenesses(report):
        longest = float(late.mean_s.max()) or 1.0
        shown = range(late.mean_s.size)
        if late.mean_s.size > _MANY_WORKERS:
            shown = np.argsort(-late.mean_s, kind="stable")[:_LATEST].tolist()
        bars = [
            Bar(
                label=f"worker {worker}",
                strategy=list(report.strategies).index(strategy),
                percent=100 * float(late.mean_s[worker]) / longest,
                text=write(float(late.mean_s[worker]), SECONDS),
                more=f"last in {write(float(late.last_share[worker]), SHARE)}",
                mark=worker == slow,
            )
            for worker in shown
        ]
        yield Bars(
            heading=strategy.label,
            bars=bars,
            sentence=lateness_sentence(late),
            left_out=late.mean_s.size - len(bars),
        )


def traffic_bars(report: PageContent) -> Iterator[Bars]:
    """Bytes, messages and memory."""
    for name in ("bytes_per_step", "messages_per_step", "peak_memory_bytes"):
        values = [median(strategy, name) for strategy in report.strategies]
        longest = max((value for value in values if value is not None), default=None)
        if longest is None:
            continue
        bars = [
            Bar(
                label=strategy.label,
                strategy=number,
                percent=100 * value / (longest or 1.0),
                text=write(value, MEASURES[name].unit),
            )
            for number, (strategy, value) in enumerate(zip(report.strategies, values, strict=True))
            if value is not None
        ]
        yield Bars(heading=MEASURES[name].title, bars=bars)


def _row(report: PageContent, name: str, measure: Measure) -> Row:
    best, equals = _best(report, name, measure)
    cells = []
    for strategy in report.strategies:
        estimate = strategy.measures.get(name)
        if strategy.failure is not None and (estimate is None or estimate.median is None):
            cells.append(Cell(text="failed"))
        elif estimate is None or estimate.median is None:
            cells.append(Cell(text="not reached" if "_to_target" in name else NOTHING))
        else:
            text, interval = write_estimate(estimate, measure.unit)
            is_best, partial = best == strategy.label and not equals, None in estimate.values
            cells.append(Cell(text=text, interval=interval, best=is_best, partial=partial))
    note = (
        f"no difference beyond the spread between {', '.join([best, *equals[:-1]])} and"
        f" {equals[-1]}."
        if best and equals
        else ""
    )
    short = capital(SHORT.get(name, "").format(metric=report.metric_name))
    return Row(title=_title(measure, report), cells=cells, note=note, short=short)


def _best(report: PageContent, name: str, measure: Measure) -> tuple[str | None, list[str]]:
    """The best strategy of a measure, and those from which it does not differ beyond
    the spread.
    """
    better = report.metric_better if measure.better is None else measure.better
    values = {
        strategy.label: estimate.median
        for strategy in report.strategies
        if (estimate := strategy.measures.get(name)) is not None
        and estimate.median is not None
        and None not in estimate.values  # as of a target that some runs did not reach
    }
    differences = [found for found in report.differences if found.measure == name]
    if better is Better.NEITHER or not report.compares:
        return None, []
    # Nothing is known of a single run's spread.
    if not values or all(found.low is None for found in differences):
        return None, []
    best = max(values, key=lambda label: better.value * values[label])
    return best, [
        label for label in values if label != best and not _decided(differences, best, label)
    ]


def _decided(differences: Sequence[Difference], a: str, b: str) -> bool:
    return any(found.decided for found in differences if {found.a, found.b} == {a, b})


def _title(measure: Measure, report: PageContent) -> str:
    return capital(measure.title.format(metric=report.metric_name))


def lateness_sentence(late: Lateness) -> str:
    """Who comes last, and how late. Whether one worker is slow is decided over all strategies."""
    spread = write(late.spread_s, SECONDS)
    if late.together:
        return f"Workers come together: the last one {spread} after the first on average."
    last = late.slow_worker
    if last is not None:
        share, behind_s = float(late.last_share[last]), float(late.mean_s[last])
        return (
            f"Worker {last} was last in {share:.0%} of steps, {write(behind_s, SECONDS)} behind"
            " the first on average."
        )
    return (
        "Workers take turns at coming last: none was last in more than"
        f" {late.last_share.max():.0%} of steps. The last one came {spread} after the first on"
        " average."
    )
