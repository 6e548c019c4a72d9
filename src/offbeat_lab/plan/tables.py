"""A plan as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat_lab.cluster.quantities import display_duration, display_rate, rounded
from offbeat_lab.plan.plans import Plan, memory_text
from offbeat_lab.plan.predictions import StepPrediction

WORDS = (
    "Step: its mean, and the band that holds 80% of such steps elsewhere. Ideal: share of the speed"
    " of workers that exchange nothing. Binds: what most of the rest goes to, encode (selection,"
    " copies, factors), waiting for peers, alpha (latencies, messages) or beta (bytes). Memory: of"
    " a device, weights, gradients, the optimizer's and the strategy's, and activations where they"
    " are known; ! where it has less."
)
"""What the columns mean."""

_LONG = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
"""Units of times that are at least two of them."""


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
    for rate, workers in sorted({(p.rate_bit_per_s, p.workers) for p in plan.predictions}):
        ones = plan.at(workers, rate)
        columns = [_cells(one, plan) for one in ones]
        yield PlanTable(
            title=f"{workers} worker{'s' * (workers > 1)}, {display_rate(rate)}",
            heads=list(columns[0]),
            rows=[list(one.values()) for one in columns],
            best=ones.index(plan.best(workers, rate)),
        )


def column_words(plan: Plan) -> str:
    """What the columns of its tables mean."""
    words = [WORDS]
    if plan.request.price is None:
        words.append("MB sent: by a worker in a step.")
    if plan.request.to_target is not None:
        words.append("Target: time to it, measured steps x predicted step, with what deaths cost.")
    if _has_deaths(plan):
        words.append("Goodput: samples a second, with what deaths of workers cost.")
    if (samples := plan.request.samples) is not None:
        tokens = plan.request.profile.tokens_per_sample
        amount = f"{samples * tokens:.3g} tokens" if tokens else f"{samples:.3g} samples"
        words.append(f"Time and cost: to {amount}, with what deaths cost.")
    return " ".join(words)


def _has_deaths(plan: Plan) -> bool:
    return any(one.lost_to_deaths for one in plan.predictions)


def _cells(one: StepPrediction, plan: Plan) -> dict[str, str]:
    """By head. The time to a target, or to what is asked for, takes the place of samples a second,
    and what it costs that of bytes.
    """
    limit = "> " if one.is_lower_limit else ""
    request = plan.request
    cells = {
        "strategy": one.strategy,
        "step": f"{limit}{display_duration(rounded(one.step_s))}",
        "band": band_text(one),
    }
    if request.to_target is not None:
        cells["target"] = _time_text(one, one.time_to_target_s)
    elif request.samples is not None:
        cells["time"] = _time_text(one, one.time_s)
    elif _has_deaths(plan):
        cells["goodput"] = _number(one.goodput_per_s)
    else:
        cells["samples/s"] = _number(one.samples_per_s)
    if request.price is not None:
        cells["cost"] = "" if one.cost is None else f"{limit}{_number(one.cost)}"
    else:
        cells["MB sent"] = _number(one.bytes_per_step / 1e6)
    return cells | {
        "ideal": f"{one.share_of_ideal:.0%}",
        "binds": one.binds,
        "memory": memory_text(one.memory_bytes) + ("" if one.fits else "!"),
    }


def band_text(one: StepPrediction) -> str:
    """`7.07 to 9.6`, in the unit of the step."""
    _, unit = display_duration(rounded(one.step_s)).split()
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return f"{_number(factor * one.low_s)} to {_number(factor * one.high_s)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time_text(one: StepPrediction, seconds: float | None) -> str:
    """`2.5 h`; empty where it is unknown."""
    if seconds is None:
        return "never" if one.never_ends else ""
    size, unit = next((each for each in _LONG if seconds >= 2 * each[0]), (1.0, "s"))
    limit = "> " if one.is_lower_limit else ""
    return f"{limit}{_number(seconds / size)} {unit}"
