"""A plan's predictions as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat_lab.cluster.quantities import display_duration, display_rate
from offbeat_lab.plan.predictions import Plan, StepPrediction

WORDS = (
    "Step: its mean, and the band in which it is expected. MB sent: by a worker in a step. Ideal:"
    " share of the speed of workers that exchange nothing. Binds: what most of the rest goes to,"
    " encode (selection, copies, factors), waiting for peers, alpha (latencies, messages) or beta"
    " (bytes). Memory: weights, gradients, the optimizer's and the strategy's; not activations."
)
"""What the columns mean."""

_LONG = ((172_800.0, "d"), (7200.0, "h"), (120.0, "min"))

TARGET_WORDS = "Target: time to it, measured steps x predicted step."

DEATH_WORDS = "Deaths: share of the time that is lost to deaths of workers."


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTable:
    """All strategies on one cluster.

    Attributes:
        title: the cluster, in short.
        heads: of the columns, strategies first.
        rows: of a strategy each, in the order in which they were named.
        best: the number of the row that is recommended.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int


def plan_tables(plan: Plan) -> Iterator[PlanTable]:
    """One for each rate and number of workers, ascending."""
    has_deaths, has_target = _has_deaths(plan), plan.request.to_target is not None
    for rate, workers in sorted({(p.rate_bit_per_s, p.workers) for p in plan.predictions}):
        ones = plan.at(workers, rate)
        columns = [_cells(one, has_deaths=has_deaths, has_target=has_target) for one in ones]
        yield PlanTable(
            title=f"{workers} worker{'s' * (workers > 1)}, {display_rate(rate)}",
            heads=list(columns[0]),
            rows=[list(one.values()) for one in columns],
            best=ones.index(plan.best(workers, rate)),
        )


def column_words(plan: Plan) -> str:
    """What the columns of its tables mean."""
    words = [WORDS]
    if plan.request.to_target is not None:
        words.append(TARGET_WORDS)
    if _has_deaths(plan):
        words.append(DEATH_WORDS)
    return " ".join(words)


def _has_deaths(plan: Plan) -> bool:
    return any(one.lost_to_deaths for one in plan.predictions)


def _cells(one: StepPrediction, *, has_deaths: bool, has_target: bool) -> dict[str, str]:
    """By head. The time to a target takes the place of samples a second."""
    limit = "> " if one.is_lower_limit else ""
    cells = {
        "strategy": one.strategy,
        "step": f"{limit}{display_duration(_three_digits(one.step_s))}",
        "band": band_text(one),
        **({} if has_target else {"samples/s": _number(one.samples_per_s)}),
        "MB sent": f"{one.bytes_per_step / 1e6:.3g}",
        "ideal": f"{one.share_of_ideal:.0%}",
        "binds": one.binds,
        "memory": _memory_text(one.memory_bytes),
    }
    if has_target:
        time = _time_text(one.time_to_target_s)
        cells["target"] = f"{limit}{time}" if time else ""
    if has_deaths:
        cells["deaths"] = f"{one.lost_to_deaths:.1%}"
    return cells


def band_text(one: StepPrediction) -> str:
    """`7.07 to 9.6`, in the unit of the step."""
    _, unit = display_duration(_three_digits(one.step_s)).split()
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return f"{_number(factor * one.low_s)} to {_number(factor * one.high_s)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time_text(seconds: float | None) -> str:
    """`2.5 h`; empty where it is unknown."""
    if seconds is None:
        return ""
    size, unit = next((one for one in _LONG if seconds >= one[0]), (1.0, "s"))
    return f"{_number(seconds / size)} {unit}"


def _memory_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
