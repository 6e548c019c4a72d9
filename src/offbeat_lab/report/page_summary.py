"""What the page begins with: three numbers below the verdict, and what to do about waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from offbeat_lab.breakdown import Lateness, lateness, slow_worker_of
from offbeat_lab.figures import MEASURES, SECONDS, SHARE, Measure, capital, write, write_estimate
from offbeat_lab.report.data import PageContent, StrategyResults

_OF_COMPARISONS: Final = (
    "time_to_target_s",
    "step_s",
    "bytes_per_step",
    "final_metric",
    "samples_per_s",
)
_OF_RUNS: Final = ("step_s", "share_wait", "bytes_per_step", "samples_per_s", "final_metric")
SHORT: Final = {
    "time_to_target_s": "to target",
    "final_metric": "{metric}",
    "step_s": "a step",
    "share_wait": "waiting for others",
    "bytes_per_step": "sent a step",
}
"""What a reader looks for first, under headings that fit on a phone."""

_HOW_MANY: Final = 3
_DENSE: Final = ("ddp", "allreduce")

_MUCH: Final = 0.1
"""What takes less than this part of a step is not worth another strategy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyNumber:
    """One number in large type.

    Attributes:
        text: the value.
        title: what it is.
        beside: the value of another strategy, and whether there is a difference.
    """

    text: str
    title: str
    beside: str = ""


def key_numbers(report: PageContent) -> list[KeyNumber]:
    """Of the strategy that the verdict speaks of, beside the dense one or the next best."""
    best = _named(report, report.winner)
    if best is None:
        return []
    found: list[KeyNumber] = []
    for name in _OF_COMPARISONS if report.compares else _OF_RUNS:
        value = median(best, name)
        if value is not None and len(found) < _HOW_MANY:
            found.append(
                KeyNumber(
                    text=write(value, MEASURES[name].unit),
                    title=_title(MEASURES[name], name, report),
                    beside=_beside(report, best, name),
                )
            )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to do about waiting, and of which strategy it speaks."""

    text: str
    strategy: int


def advice(report: PageContent) -> Advice | None:
    """Who waits for whom, and what to do about it, in a sentence or two; None where nothing is
    known.
    """
    known = list(latenesses(report))
    if not known:
        return None
    one, text = _advised(report, known)
    return Advice(text=text, strategy=list(report.strategies).index(one))


def _advised(
    report: PageContent, known: Sequence[tuple[StrategyResults, Lateness]]
) -> tuple[StrategyResults, str]:
    slow = slow_worker_of(late.slow_worker for _, late in known)
    if slow is not None:
        one, late = next(pair for pair in known if pair[1].slow_worker == slow)
        return one, (
            f"Worker {slow} is slow: its peers wait for it{_under(report, one)},"
            f" {write(float(late.mean_s[slow]), SECONDS)} in a step of"
            f" {write(median(one, 'step_s') or late.step_s, SECONDS)}. Find out what holds it up,"
            " or take a strategy that does not wait for it: adaptive gives it fewer samples, wagma"
            " averages without it."
        )
    one, late = max(known, key=lambda pair: median(pair[0], "share_wait") or 0.0)
    wait = median(one, "share_wait") or 0.0
    if wait >= _MUCH:
        return one, (
            f"Another worker is late each time{_under(report, one)}, and waiting takes"
            f" {write(wait, SHARE)} of a step. Strategies that do not wait for the last one (wagma,"
            " adpsgd, eagersgd), or that meet more rarely (localsgd), lose less by that."
        )
    best = _named(report, report.winner) or one
    transfer, compute = median(best, "share_transfer"), median(best, "share_compute")
    nobody = "Nobody has to be waited for"
    if transfer is not None and transfer >= _MUCH:
        return best, (
            f"{nobody}. Transfer takes {write(transfer, SHARE)} of a step{_under(report, best)}:"
            " faster links or a strategy that sends less would help."
        )
    if compute is None:
        return best, f"{nobody}."
    return best, (
        f"{nobody}, and computing takes {write(compute, SHARE)} of a step{_under(report, best)}:"
        " another strategy can hardly make steps shorter."
    )


def latenesses(report: PageContent) -> Iterator[tuple[StrategyResults, Lateness]]:
    """How late workers were under each strategy whose workers wait for each other."""
    for strategy in report.strategies:
        late = lateness([run.steps for run in strategy.runs])
        if late is not None:
            yield strategy, late


def slow_worker(report: PageContent) -> int | None:
    """The one slow worker of all that the page shows."""
    return slow_worker_of(late.slow_worker for _, late in latenesses(report))


def median(strategy: StrategyResults, name: str) -> float | None:
    estimate = strategy.measures.get(name)
    return None if estimate is None else estimate.median


def _under(report: PageContent, strategy: StrategyResults) -> str:
    return f" under {strategy.label}" if report.compares else ""


def _named(report: PageContent, label: str | None) -> StrategyResults | None:
    return next((one for one in report.strategies if one.label == label), None)


def _title(measure: Measure, name: str, report: PageContent) -> str:
    if name == "time_to_target_s" and report.target is not None:
        return f"To {report.metric_name} {report.target:.4g}"
    return capital((SHORT.get(name) or measure.title).format(metric=report.metric_name))


def _beside(report: PageContent, best: StrategyResults, name: str) -> str:
    """Such as `gtopk; ddp 1.2 s`."""
    if not report.compares:
        return ""
    others = [one for one in report.strategies if one is not best]
    dense = [one for one in others if one.strategy in _DENSE]
    rest = sorted(others, key=lambda one: median(one, "step_s") or float("inf"))
    other = next((one for one in [*dense, *rest] if median(one, name) is not None), None)
    if other is None:
        return best.label
    estimate = other.measures[name]
    text, how_many = write_estimate(estimate, MEASURES[name].unit)
    return f"{best.label}; {other.label} {text}{f' {how_many}' * (None in estimate.values)}"
