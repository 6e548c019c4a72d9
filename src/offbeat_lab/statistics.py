"""Medians with intervals, and when a difference is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.95
_RESAMPLES = 2_000
_SEED = 0
_BLOCKS = 12
LEAST_SEEDS = 3
"""For Student's interval: that of two is so wide that it says nothing, but for which is larger."""
_MAX_WARM_UP_STEPS = 10
_MOST_LOG = 36.0
"""The end of an interval whose logarithm is larger is more than a record holds."""


class Estimate(BaseModel):
    """A measured quantity.

    Attributes:
        values: one for each seed; None where a run has none.
        median: over the samples; None without any.
        low, high: 95% interval: the wider of a bootstrap of the median and Student's over seeds;
            None with too few samples.
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
        low, high: 95% bootstrap interval; None where there are too few samples to say, or some of
            them are zero.
        decided: whether the difference is larger than the spread: the interval leaves out 1, and
            the two quantities' own intervals do not overlap.
    """

    model_config = ConfigDict(frozen=True)

    ratio: float
    low: float | None
    high: float | None
    decided: bool


def num_warm_up(num_steps: int) -> int:
    """How many steps at the beginning are not typical: memory is allocated and buckets are found in
    them.
    """
    return min(_MAX_WARM_UP_STEPS, num_steps // 4)


def block_slices(num_steps: int, ends: Sequence[int] = ()) -> list[slice]:
    """About twelve blocks of consecutive steps, without the first ones; at least one unless there
    is no step.

    The mean within a block is fair to strategies that communicate every few steps; the median over
    blocks is not impressed by a hiccup of the machine.

    Args:
        num_steps: of the run.
        ends: what every block is to begin and to end with, such as the steps behind which an
            exchange is over, in rising order; (): any step. If not two of them are left, all that
            is left is one block.
    """
    begin = num_warm_up(num_steps)
    bounds = np.array(
        [end for end in ends if end >= begin] if ends else range(begin, num_steps + 1)
    )
    if bounds.size < 2:
        bounds = np.array([begin, num_steps])
    pieces = np.arange(bounds.size - 1)
    parts = np.array_split(pieces, max(1, min(_BLOCKS, pieces.size)))
    return [slice(int(bounds[part[0]]), int(bounds[part[-1] + 1])) for part in parts if num_steps]


def estimate(
    values: Sequence[float | None],
    samples: Sequence[float] | None = None,
    *,
    signed: bool = False,
    most: float | None = None,
) -> Estimate:
    """The median of `samples`, by default of `values`, and its interval.

    Args:
        values: one for each seed.
        samples: finer ones from within the runs, if there are.
        signed: whether they are such as may be below zero, as differences are. Else an interval of
            positive values is taken on a logarithmic scale, so that it never holds 0.
        most: no value can be larger, and so no end of an interval is.
    """
    by_seed = _known(values)
    data = by_seed if samples is None else np.array(samples, dtype=np.float64)
    if not data.size:
        return Estimate(values=list(values), median=None, low=None, high=None)
    low, high = _hull(_bootstrap((data,), np.median), _student(by_seed, signed=signed))
    if most is not None and high is not None:
        high = min(high, most)
    return Estimate(values=list(values), median=float(np.median(data)), low=low, high=high)


def compare(
    a: Estimate,
    b: Estimate,
    samples_a: Sequence[float] | None = None,
    samples_b: Sequence[float] | None = None,
) -> Ratio:
    """How many times larger `a` is than `b`. Both have a median other than zero.

    Args:
        a, b: the quantities, their values by the same seeds.
        samples_a, samples_b: what their medians were taken of, if not of their values.
    """
    assert a.median is not None
    assert b.median
    ratio = a.median / b.median
    first = _known(a.values if samples_a is None else samples_a)
    second = _known(b.values if samples_b is None else samples_b)
    if min(first.size, second.size) < 2 or not (first.all() and second.all()):
        return Ratio(ratio=ratio, low=None, high=None, decided=False)
    by_seed = _known(
        [x / y if x is not None and y else None for x, y in zip(a.values, b.values, strict=False)]
    )
    low, high = _hull(
        _bootstrap(
            (first, second), lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis)
        ),
        _student(by_seed, least=2 if samples_a is None else LEAST_SEEDS),
    )
    if low is None or high is None:
        return Ratio(ratio=ratio, low=None, high=None, decided=False)
    apart = None not in (a.low, a.high, b.low, b.high) and (a.low > b.high or b.low > a.high)  # type: ignore[operator]
    return Ratio(ratio=ratio, low=low, high=high, decided=bool(apart and not low <= 1 <= high))


def _known(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _bootstrap(
    data: tuple[NDArray[np.float64], ...], statistic: Callable[..., object]
) -> tuple[float, float] | None:
    """Percentile interval; None where a sample is too small."""
    from scipy import stats  # late, since it takes half a second and workers import this module

    if min(part.size for part in data) < 2:
        return None
    if all(np.ptp(part) == 0 for part in data):  # a bootstrap of equal numbers is not a number
        value = float(np.asarray(statistic(*data, axis=-1)))
        return value, value
    interval = stats.bootstrap(
        data,
        statistic,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _student(
    by_seed: NDArray[np.float64], *, signed: bool = False, least: int = LEAST_SEEDS
) -> tuple[float, float] | None:
    """Student's interval of the mean over seeds, on a logarithmic scale where that can be and the
    values are not `signed`.

    A bootstrap of three numbers never leaves their range, and so promises more than they can:
    another three differ by more.
    """
    from scipy import stats  # late, since it takes half a second and workers import this module

    if by_seed.size < least:
        return None
    positive = not signed and bool((by_seed > 0).all())
    data = np.log(by_seed) if positive else by_seed
    spread = float(
        stats.t.ppf((1 + CONFIDENCE) / 2, data.size - 1) * data.std(ddof=1) / np.sqrt(data.size)
    )
    ends = np.array([data.mean() - spread, data.mean() + spread])
    low, high = np.exp(np.clip(ends, -700, _MOST_LOG)) if positive else ends
    return float(low), float(high)


def _hull(*intervals: tuple[float, float] | None) -> tuple[float | None, float | None]:
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return None, None
    return min(low for low, _ in known), max(high for _, high in known)
