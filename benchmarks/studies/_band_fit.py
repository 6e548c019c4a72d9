"""Fits the bands of `offbeat plan`: quantiles by linear regression, where every set of measurements
counts as much as every other. `fit_band` chooses quantiles so that sets that are left out of the
fit are covered as often as is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.optimize import linprog

from offbeat_lab.plan.bands import Band, Factor, Seen

COVERAGE: Final = 0.8
"""Of measured steps, those that a band is to hold."""

FASTER: Final = 0.05
"""By which dense exchanges may be faster than simulated: on links that a lab shaped NCCL's were, by
2 to 4%.
"""

_QUANTILES: Final = (0.8, 0.84, 0.88, 0.92, 0.96, 0.98)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
    """A prediction that was held against a measured step.

    Attributes:
        of: the set of measurements that it belongs to.
        strategy: its name.
        workers: how many.
        rate_bit_per_s: of their links.
        exposed: which part of the predicted step is exchange that nothing hides, 0 to 1.
        overlapped: which part of it is exchange beside computing, 0 to 1 - exposed.
        ratio: measured over predicted, > 0.
    """

    of: str
    strategy: str
    workers: int
    rate_bit_per_s: float
    exposed: float
    overlapped: float
    ratio: float


def of_cell(factor: Factor, cell: MeasuredCell) -> float:
    return factor.of(exposed=cell.exposed, overlapped=cell.overlapped)


def holds(band: Band, cell: MeasuredCell) -> bool:
    return of_cell(band.low, cell) <= cell.ratio <= of_cell(band.high, cell)


def is_close(band: Band, cell: MeasuredCell, share: float) -> bool:
    """Whether a prediction is off by no more than `share`."""
    return abs(math.log(cell.ratio / of_cell(band.middle, cell))) <= math.log(1 + share)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """What a band says of a set that it was not fitted to.

    Attributes:
        of: the set.
        cells: how many it has.
        inside: of them, those in the band.
        close: those that are predicted within a share.
    """

    of: str
    cells: int
    inside: int
    close: int


def fit_band(cells: Sequence[MeasuredCell], *, is_shifted: bool) -> tuple[Band, list[HeldOut]]:
    """A band that holds `COVERAGE` of sets that it was not fitted to, in their mean, and what it
    says of each; the widest there is where none does.

    Args:
        cells: of two sets or more.
        is_shifted: whether predictions follow the median of what was measured; else they are what
            was simulated.
    """
    for quantile in _QUANTILES:
        held = held_out(cells, quantile, is_shifted=is_shifted)
        if np.mean([one.inside / one.cells for one in held]) >= COVERAGE:
            break
    return _fit(cells, quantile, is_shifted=is_shifted), held


def held_out(
    cells: Sequence[MeasuredCell], quantile: float, *, is_shifted: bool, share: float = 0.15
) -> list[HeldOut]:
    """Each set, by a band between quantiles of all other sets.

    Args:
        cells: of two sets or more.
        quantile: which part of the other sets lies in the band.
        is_shifted: as of `fit_band`.
        share: within which a prediction is close.
    """
    found = []
    for name in dict.fromkeys(cell.of for cell in cells):
        band = _fit([one for one in cells if one.of != name], quantile, is_shifted=is_shifted)
        its = [one for one in cells if one.of == name]
        found.append(
            HeldOut(
                of=name,
                cells=len(its),
                inside=sum(holds(band, one) for one in its),
                close=sum(is_close(band, one, share) for one in its),
            )
        )
    return found


def _fit(cells: Sequence[MeasuredCell], quantile: float, *, is_shifted: bool) -> Band:
    tail = (1 - quantile) / 2
    middle = Factor()
    if is_shifted:
        # Sets do not agree on what exposed exchanges take over links' rates: that is simulated.
        middle = replace(_factor(cells, 0.5), exposed=0.0)
    low, high = _factor(cells, tail), _factor(cells, 1 - tail)
    return Band(
        low=_edge(min, low, replace(middle, exposed=-FASTER)),
        middle=middle,
        high=_edge(max, high, middle),
        seen=tuple(_seen(cells, middle)),
    )


def _edge(which: Callable[[float, float], float], one: Factor, other: Factor) -> Factor:
    return Factor(
        none=which(one.none, other.none),
        overlapped=which(one.overlapped, other.overlapped),
        exposed=which(one.exposed, other.exposed),
    )


def _factor(cells: Sequence[MeasuredCell], quantile: float) -> Factor:
    """Below which `quantile` of the sets' weight lies: least sum of absolute residuals, those above
    it `quantile` times, those below it 1 - `quantile` times.
    """
    sizes = {name: sum(one.of == name for one in cells) for name in {one.of for one in cells}}
    weights = np.array([1 / sizes[one.of] for one in cells])
    shares = np.array(
        [[1 - one.overlapped - one.exposed, one.overlapped, one.exposed] for one in cells]
    )
    count = len(cells)
    found = linprog(
        np.concatenate([np.zeros(3), quantile * weights, (1 - quantile) * weights]),
        A_eq=np.hstack([shares, np.eye(count), -np.eye(count)]),
        b_eq=[math.log(one.ratio) for one in cells],
        bounds=[(-1.5, 1.5)] * 3 + [(0, None)] * (2 * count),
    )
    none, overlapped, exposed = (round(float(value), 4) for value in found.x[:3])
    return Factor(none=none, overlapped=overlapped, exposed=exposed)


def _seen(cells: Sequence[MeasuredCell], middle: Factor) -> Iterator[Seen]:
    for of, name in sorted({(cell.of, cell.strategy) for cell in cells}):
        its = [one for one in cells if (one.of, one.strategy) == (of, name)]
        errors = sorted(abs(math.log(one.ratio / of_cell(middle, one))) for one in its)
        yield Seen(
            of=of,
            strategy=name,
            cells=len(its),
            fewest=min(one.workers for one in its),
            most=max(one.workers for one in its),
            slowest=min(one.rate_bit_per_s for one in its),
            fastest=max(one.rate_bit_per_s for one in its),
            within=round(math.exp(errors[math.ceil(COVERAGE * len(errors)) - 1]) - 1, 3),
        )
