"""What follows from the updates that workers have made in a mega-batch: batch sizes with which all
make equally many, learning rates, and the weights with which their models are merged.

In a mega-batch a worker that is free takes its next batch of b_i samples. A worker of twice the
speed makes twice as many updates u_i, until its batches are twice as large. Between mega-batches a
rule looks at u and chooses b:

    proportional   b_i u_i / mean u, scaled so that they sum to n b_base
    published      b_i + beta (u_i - mean u), if that lies within bounds, else b_i

Adaptive SGD: arXiv 2110.07029. The learning rate follows the size, eta_i = eta_0 b_i / b_base, and
merge weights follow updates:

    alpha_i = u_i / sum u, or b_i / sum b where all made the same number of updates
    as published, if every replica is regular, ||w_i|| / (number of parameters) < 0.1: the largest
    alpha times 1.1, the smallest times 0.9, divided by their sum

**Differences from the paper.** `PublishedRule` is its rule, but for rounding to whole samples and
bounds of each worker. It corrects b_i by beta u_i / b_i times what is needed, which oscillates
above 2: with its beta of b_min / 2 and b_min of b_max / 8 that is a worker with u_i > 32 at b_max,
or fewer at a smaller batch. Where the first step leads out of bounds it never makes one. Learning
rates are derived from eta_0 each time, not multiplied on, so that they cannot drift. Perturbed
weights are divided by their sum: as published they sum to 1 + 0.1 (alpha_max - alpha_min), so the
model grows in every merge. Equal weights are left alone: there is no largest and no smallest.

In the paper all updates of a worker have b_i samples. Here the last one before a merge may have
fewer or more: it counts as so many b_i-ths of an update. The u_i are equal if they are so when
rounded, and then alpha_i = u_i b_i / sum u b. Where all updates have b_i samples this is the
published rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

RateScaling: TypeAlias = Literal["auto", "linear", "sqrt"]


NO_LIMIT: Final = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a worker's batch may have.

    Attributes:
        smallest: in samples, >= 1.
        largest: in samples, >= smallest, such as fit into its memory.
    """

    smallest: int = 1
    largest: int = NO_LIMIT

    def clip(self, size: int) -> int:
        return max(self.smallest, min(size, self.largest))


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRule:
    """b_i + beta (u_i - mean u), rounded; a worker for which that is out of bounds stays as it is.
    Beta is half the worker's smallest size.

    >>> PublishedRule().resize([1024, 1024], [40, 60], [Bounds(smallest=128, largest=2048)] * 2)
    (384, 1664)
    >>> PublishedRule().resize([1024, 1024], [33, 67], [Bounds(smallest=128, largest=1024)] * 2)
    (1024, 1024)
    """

    only_ratios_count: ClassVar[bool] = False

    def resize(
        self, batch_sizes: Sequence[int], updates: Sequence[float], bounds: Sequence[Bounds]
    ) -> tuple[int, ...]:
        """The sizes for the next mega-batch.

        Args:
            batch_sizes: of the last one, in samples, by worker, each within its bounds.
            updates: each worker's in the last one, >= 0. A worker that made none was not there: it
                is as if it had made as many as the mean of its peers.
            bounds: by worker.
        """
        ahead = _ahead(updates)

        def resized(size: int, ahead: float, bound: Bounds) -> int:
            proposed = round(size + bound.smallest / 2 * ahead)
            return proposed if bound.clip(proposed) == proposed else size

        return tuple(map(resized, batch_sizes, ahead, bounds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportional:
    """b_i u_i / mean u, scaled and clipped. One step ends at equal updates if speeds stay what they
    are.

    The sizes sum to n b_base where no bound binds. An upper bound that binds makes the other
    batches smaller too, so that updates stay equal; the sum is less then. A lower bound that binds
    takes from the other batches. Sizes are whole: fractions are dropped, and what is missing goes
    to the largest fractions, among equals to the lowest rank.

    Only ratios of updates count, so updates per second of computing do as well, and are less
    coarse.

    Attributes:
        base: b_base, the mean size, in samples, >= 1.

    >>> Proportional(base=96).resize([96, 96, 96], [40, 40, 20], [Bounds()] * 3)
    (115, 115, 58)
    >>> Proportional(base=96).resize([96, 96, 96], [40, 40, 20], [Bounds(largest=96)] * 3)
    (96, 96, 48)
    """

    only_ratios_count: ClassVar[bool] = True

    base: int

    def resize(
        self, batch_sizes: Sequence[int], updates: Sequence[float], bounds: Sequence[Bounds]
    ) -> tuple[int, ...]:
        """As of `PublishedRule`."""
        mean = _mean(updates)
        total = self.base * len(batch_sizes)
        ratios = 1 + np.array(_ahead(updates)) / mean
        wanted = np.array(batch_sizes) * ratios
        smallest = np.array([bound.smallest for bound in bounds], dtype=np.float64)
        largest = np.array(
            [max(bound.smallest, min(bound.largest, total)) for bound in bounds], dtype=np.float64
        )
        scale = min(_scale(wanted, smallest, largest, total), float(np.min(largest / wanted)))
        return _whole(np.clip(scale * wanted, smallest, largest))


BatchRule: TypeAlias = PublishedRule | Proportional
"""How batch sizes follow from updates, which with some rules may be given in any unit, such as
updates per second: where `only_ratios_count`.
"""


def binding(
    batch_sizes: Sequence[int], bounds: Sequence[Bounds]
) -> dict[int, Literal["smallest", "largest"]]:
    """Which workers' sizes are at a bound, and at which: what limits the rule and should be shown.

    >>> binding([8, 16, 32], [Bounds(smallest=8, largest=32)] * 3)
    {0: 'smallest', 2: 'largest'}
    """
    found: dict[int, Literal["smallest", "largest"]] = {}
    for rank, (size, bound) in enumerate(zip(batch_sizes, bounds, strict=True)):
        if size == bound.largest:
            found[rank] = "largest"
        elif size == bound.smallest:
            found[rank] = "smallest"
    return found


def square_root_rate(eta_0: float, batch_size: float, base: int, num_ranks: int) -> float:
    """eta_0 sqrt(n b_i / b_base), for an optimizer that divides by the root of squared gradients.

    Where noise dominates, a rank's own gradient of b_i samples has a root mean square that is
    sqrt(n b_base / b_i) times that of the mean gradient of n b_base samples, for which eta_0 is. So
    its step is as many times shorter; and it counts for b_i / b_base updates.

    >>> square_root_rate(0.1, 32, 32, 4), square_root_rate(0.1, 8, 32, 4)
    (0.2, 0.1)
    """
    return eta_0 * math.sqrt(num_ranks * batch_size / base)


def normalised(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares divided by their sum.

    Args:
        shares: >= 0, not all zero.

    >>> normalised([3, 1])
    (0.75, 0.25)
    """
    total = sum(shares)
    return tuple(share / total for share in shares)


def merge_weights(updates: Sequence[float], batch_sizes: Sequence[int]) -> tuple[float, ...]:
    """Each worker's weight in the merge, by updates unless these are equal, and then by batch
    sizes; they sum to 1. A worker that did nothing in this mega-batch has none.

    Args:
        updates: of each worker, counted by their samples: whole numbers where all its updates have
            as many as its batch size.
        batch_sizes: of each worker.

    >>> merge_weights([30, 10], [64, 64])
    (0.75, 0.25)
    >>> merge_weights([20, 20], [96, 32])
    (0.75, 0.25)
    >>> merge_weights([20, 19.5], [64, 128])
    (0.3389830508474576, 0.6610169491525424)
    """
    if len({round(made) for made in updates}) == 1:
        return normalised([made * size for made, size in zip(updates, batch_sizes, strict=True)])
    return normalised(updates)


DELTA: Final = 0.1
"""By which part the largest merge weight is raised, and the smallest lowered."""

REGULAR_BELOW: Final = 0.1
"""A replica is regular if its norm per parameter is less."""


def perturbed(weights: Sequence[float], norms_per_parameter: Sequence[float]) -> tuple[float, ...]:
    """More for the worker that did most and less for the one that did least, if no replica is
    large.

    Args:
        weights: of each worker, summing to 1.
        norms_per_parameter: ||w_i|| / (number of parameters), of each worker's model.

    >>> [round(weight, 3) for weight in perturbed([0.5, 0.3, 0.2], [0.01] * 3)]
    [0.534, 0.291, 0.175]
    """
    most, least = max(weights), min(weights)
    if most == least or max(norms_per_parameter) >= REGULAR_BELOW:
        return tuple(weights)
    changed = list(weights)
    changed[changed.index(most)] *= 1 + DELTA
    changed[changed.index(least)] *= 1 - DELTA
    return normalised(changed)


def _mean(updates: Sequence[float]) -> float:
    """Mean of the workers that were there; 1 if none was."""
    there = [made for made in updates if made]
    return sum(there) / len(there) if there else 1.0


def _ahead(updates: Sequence[float]) -> list[float]:
    """u_i - mean u; 0 for a worker that was not there."""
    mean = _mean(updates)
    return [made - mean if made else 0.0 for made in updates]


def _scale(
    wanted: NDArray[np.float64],
    smallest: NDArray[np.float64],
    largest: NDArray[np.float64],
    total: float,
) -> float:
    """The s for which clip(s wanted) sums to `total`, or comes nearest."""
    # The sum is a straight line between the places where a bound begins to bind.
    places = np.sort(np.concatenate([smallest / wanted, largest / wanted]))
    sums = np.clip(places[:, None] * wanted, smallest, largest).sum(axis=1)
    return float(np.interp(total, sums, places))


def _whole(sizes: NDArray[np.float64]) -> tuple[int, ...]:
    """Whole numbers with the same sum, rounded, each next to its own."""
    exact = np.round(sizes, 6)  # so that 31.9999999 is no fraction
    whole = np.floor(exact).astype(np.int64)
    missing = round(float(exact.sum())) - int(whole.sum())
    by_fraction = np.argsort(whole - exact, kind="stable")
    whole[by_fraction[:missing]] += 1
    return tuple(whole.tolist())
