"""Medians with bootstrap intervals, and when a difference is one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 2_000
_SEED = 0
_BLOCKS = 12
_MAX_WARM_UP_STEPS = 10


class Estimate(BaseModel):
    """A measured quantity.

    Attributes:
        values: one for each seed; None where a run has none.
        median: over the samples; None without any.
        low, high: 95% bootstrap interval of the median; None where there are too few samples to say.
    """

    model_config = ConfigDict(frozen=True)

    values: list[float | None]
    median: float | None
    low: float | None
    high: float | None


class Ratio(BaseModel):
    """How many times larger one quantity is than another.

    Attributes:
        ratio: of the medians.
        low, high: 95% bootstrap interval; None where there are too few samples to say, or some of them are zero.
        decided: whether the difference is larger than the spread: the interval leaves out 1, and the two quantities' own
            intervals do not overlap.
    """

    model_config = ConfigDict(frozen=True)

    ratio: float
    low: float | None
    high: float | None
    decided: bool


def num_warm_up(num_steps: int) -> int:
    """How many steps at the beginning are not typical: memory is allocated and buckets are found in them."""
    return min(_MAX_WARM_UP_STEPS, num_steps // 4)


def blocks(durations_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean duration in each of about twelve blocks of consecutive steps, without the first steps.

    The mean within a block is fair to strategies
    that communicate every few steps; the median over blocks is not impressed by a hiccup of the machine.

    Args:
        durations_s: of each step, shape (steps,).
    """
    rest = durations_s[num_warm_up(durations_s.size) :]
    return np.array([block.mean() for block in np.array_split(rest, max(1, min(_BLOCKS, rest.size))) if block.size])


def estimate(values: Sequence[float | None], samples: Sequence[float] | None = None) -> Estimate:
    """The median of `samples`, by default of `values`, and its interval.

    Args:
        values: one for each seed.
        samples: finer ones from within the runs, if there are.
    """
    data = np.array([value for value in (values if samples is None else samples) if value is not None])
    if not data.size:
        return Estimate(values=list(values), median=None, low=None, high=None)
    low, high = _interval(data)
    return Estimate(values=list(values), median=float(np.median(data)), low=low, high=high)


def compare(
    a: Estimate, b: Estimate, samples_a: Sequence[float] | None = None, samples_b: Sequence[float] | None = None
) -> Ratio:
    """How many times larger `a` is than `b`. Both have a median other than zero.

    Args:
        a, b: the quantities.
        samples_a, samples_b: what their medians were taken of, if not of their values.
    """
    assert a.median is not None
    assert b.median
    first, second = _samples(a, samples_a), _samples(b, samples_b)
    if min(first.size, second.size) < 2:
        return Ratio(ratio=a.median / b.median, low=None, high=None, decided=False)
    if not (first.all() and second.all()):
        return Ratio(ratio=a.median / b.median, low=None, high=None, decided=False)
    result = stats.bootstrap(
        (first, second),
        lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    apart = None not in (a.low, a.high, b.low, b.high) and (a.low > b.high or b.low > a.high)  # type: ignore[operator]
    return Ratio(
        ratio=a.median / b.median,
        low=float(result.low),
        high=float(result.high),
        decided=bool(apart and not result.low <= 1 <= result.high),
    )


def _samples(quantity: Estimate, samples: Sequence[float] | None) -> NDArray[np.float64]:
    chosen = quantity.values if samples is None else samples
    return np.array([value for value in chosen if value is not None], dtype=np.float64)


def _interval(data: NDArray[np.float64]) -> tuple[float | None, float | None]:
    if data.size < 2:
        return None, None
    if np.ptp(data) == 0:  # a bootstrap of equal numbers is not a number
        return float(data[0]), float(data[0])
    result = stats.bootstrap(
        (data,),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(result.low), float(result.high)
