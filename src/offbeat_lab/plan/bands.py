"""How far predictions were off where they were held against measurements, and what follows for
others: a band on both sides, and how many cells like a new one there were.

A step's band depends on how much there is to exchange: what is exchanged beside computing slows it
down, and what nothing hides takes longer than links would need. In logarithms of measured over
predicted, the edges are linear in both shares of a step: quantiles by linear regression, where
every set of measurements counts as much as every other. `fit_band` chooses quantiles so that sets
that are left out of the fit are covered as often as is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

import numpy as np

from offbeat.codec.json_objects import build

COVERAGE: Final = 0.8
"""Of measured steps, those that a band is to hold."""

Kind = Literal["cpu", "gpu"]
"""Where bands were fitted: gloo on CPUs, NCCL on GPUs."""

FASTER: Final = 0.05
"""By which dense exchanges may be faster than simulated: on links that a lab shaped NCCL's were, by
2 to 4%.
"""

_QUANTILES: Final = (0.8, 0.84, 0.88, 0.92, 0.96, 0.98)
_FILE: Final = Path(__file__).with_name("bands.json")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """A factor that depends on what is exchanged in a step.

    Attributes:
        none: its logarithm where nothing is exchanged.
        overlapped: where exchanges take as long as the step, all of it beside computing.
        exposed: where the step is nothing but exchange.
    """

    none: float = 0.0
    overlapped: float = 0.0
    exposed: float = 0.0

    def of(self, *, exposed: float, overlapped: float) -> float:
        """
        >>> Factor(none=0.0, overlapped=math.log(4), exposed=1.0).of(exposed=0.0, overlapped=0.5)
        2.0
        """
        none = 1 - exposed - overlapped
        return math.exp(none * self.none + overlapped * self.overlapped + exposed * self.exposed)

    def of_cell(self, cell: MeasuredCell) -> float:
        return self.of(exposed=cell.exposed, overlapped=cell.overlapped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Cells of one strategy in one set.

    Attributes:
        of: the set.
        strategy: its name.
        cells: how many.
        fewest, most: workers.
        slowest, fastest: rates of links, in bit/s.
        within: what `COVERAGE` of them were off at most, as a share.
    """

    of: str
    strategy: str
    cells: int
    fewest: int
    most: int
    slowest: float
    fastest: float
    within: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What a step measures, as factors of its simulation.

    Attributes:
        low, high: the band.
        middle: what is predicted.
        seen: what it was fitted to.
    """

    low: Factor = Factor()
    middle: Factor = Factor()
    high: Factor = Factor()
    seen: tuple[Seen, ...] = ()

    def holds(self, cell: MeasuredCell) -> bool:
        return self.low.of_cell(cell) <= cell.ratio <= self.high.of_cell(cell)

    def is_close(self, cell: MeasuredCell, share: float) -> bool:
        """Whether a prediction is off by no more than `share`."""
        return abs(math.log(cell.ratio / self.middle.of_cell(cell))) <= math.log(1 + share)

    def like(self, strategy: str, workers: int, rate_bit_per_s: float) -> list[Seen]:
        """What was measured of `strategy` in sets with about so many workers and such links. A half
        and twice what was measured is about as much.
        """
        return [
            one
            for one in self.seen
            if one.strategy == strategy
            and one.fewest / 2 <= workers <= 2 * one.most
            and one.slowest / 2 <= rate_bit_per_s <= 2 * one.fastest
        ]


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
                inside=sum(band.holds(one) for one in its),
                close=sum(band.is_close(one, share) for one in its),
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
    from scipy.optimize import linprog  # late, since it takes a third of a second to import

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
        errors = sorted(abs(math.log(one.ratio / middle.of_cell(one))) for one in its)
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


@cache
def band_of(kind: Kind) -> Band:
    """The band that `benchmarks/studies/bands.py --write` has fitted."""
    return build(Band, json.loads(_FILE.read_text(encoding="utf-8"))[kind])
