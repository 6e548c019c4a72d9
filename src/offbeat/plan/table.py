"""A plan's predictions as rows of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat.lab.cluster.quantities import display_duration, display_rate
from offbeat.plan.predictions import Plan, StepPrediction

HEADS = ("strategy", "step", "band", "samples/s", "MB sent", "ideal", "binds", "memory")
_DEATHS = "deaths"

WORDS = (
    "Step: its mean, and the band in which it is expected. MB sent: by a worker in a step. Ideal:"
    " share of the speed of workers that exchange nothing. Binds: what most of the rest goes to,"
    " encode (selection, copies, factors), waiting for peers, alpha (latencies, messages) or beta"
    " (bytes). Memory: weights, gradients, the optimizer's and the strategy's; not activations."
)
"""What the columns mean."""

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
    has_deaths = any(one.lost_to_deaths for one in plan.predictions)
    for rate, workers in sorted({(p.rate_bit_per_s, p.workers) for p in plan.predictions}):
        ones = plan.at(workers, rate)
        yield PlanTable(
            title=f"{workers} worker{'s' * (workers > 1)}, {display_rate(rate)}",
            heads=(*HEADS, _DEATHS) if has_deaths else HEADS,
            rows=[_cells(one, has_deaths=has_deaths) for one in ones],
            best=ones.index(plan.best(workers, rate)),
        )


def column_words(plan: Plan) -> str:
    """What the columns of its tables mean."""
    has_deaths = any(one.lost_to_deaths for one in plan.predictions)
    return f"{WORDS} {DEATH_WORDS}" if has_deaths else WORDS


def _cells(one: StepPrediction, *, has_deaths: bool) -> list[str]:
    return [
        one.strategy,
        display_duration(_three_digits(one.step_s)),
        band_text(one),
        _number(one.samples_per_s),
        f"{one.bytes_per_step / 1e6:.3g}",
        f"{one.share_of_ideal:.0%}",
        one.binds,
        _memory_text(one.memory_bytes),
        *([f"{one.lost_to_deaths:.1%}"] if has_deaths else []),
    ]


def band_text(one: StepPrediction) -> str:
    """`7.07 to 9.6`, in the unit of the step."""
    _, unit = display_duration(_three_digits(one.step_s)).split()
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return f"{_number(factor * one.low_s)} to {_number(factor * one.high_s)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _memory_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
