"""What it costs to invert a symmetric matrix of d rows.

It is a polynomial a + b d^2 + c d^3 that is fitted to a few timed inversions, or a table of them.

**Difference from SPD-KFAC** (arXiv 2107.06533), which takes alpha exp(beta d): an exponential
through 147 and 4,608 rows overestimates everything between, by a factor of 2.4 for the sum over
ResNet-50's factors. It is here only to repeat what was published.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from offbeat.arithmetic.costs import fit
from offbeat.errors import ConfigError


class InversionCost(Protocol):
    """Seconds as a function of the number of rows."""

    def time_s(self, dim: int) -> float:
        """How long the inversion of a matrix of shape (dim, dim) takes, dim >= 1."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialInversion:
    """a + b d^2 + c d^3: launching, moving the matrix, operations.

    Attributes:
        constant_s: a, in seconds, >= 0.
        square_s: b, in seconds for each element, >= 0.
        cube_s: c, in seconds for each d^3, >= 0.
    """

    constant_s: float
    square_s: float
    cube_s: float

    def time_s(self, dim: int) -> float:
        return self.constant_s + self.square_s * dim**2 + self.cube_s * dim**3


def fit_inversion(samples: Iterable[tuple[int, float]]) -> PolynomialInversion:
    """The polynomial nearest to timed inversions, each (rows, seconds > 0), of three sizes or more.

    >>> timed = [(d, 1e-3 + 2e-13 * d**3) for d in (64, 256, 1024, 4096)]
    >>> fitted = fit_inversion(timed)
    >>> round(fitted.constant_s, 9), round(fitted.cube_s, 18)
    (0.001, 2e-13)
    """
    constant_s, square_s, cube_s = fit(
        samples, [lambda _: 1.0, lambda dim: dim**2, lambda dim: dim**3]
    )
    return PolynomialInversion(constant_s=constant_s, square_s=square_s, cube_s=cube_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TabledInversion:
    """What was measured, straight lines in the logarithms between, cubes above the largest size.

    Attributes:
        dims: rows, ascending, at least one.
        seconds: of each, > 0.
    """

    dims: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.dims or any(a >= b for a, b in pairwise(self.dims)) or self.dims[0] < 1:
            raise ConfigError(
                f"dims of the table are {self.dims}, allowed are one or more sizes from 1,"
                " ascending"
            )
        if len(self.seconds) != len(self.dims) or not all(
            0 < seconds < math.inf for seconds in self.seconds
        ):
            raise ConfigError(
                f"seconds of the table are {self.seconds}, allowed is one positive number a size"
            )

    def time_s(self, dim: int) -> float:
        """As measured; below the smallest size as long as it takes.

        >>> TabledInversion(dims=(10, 1000), seconds=(1.0, 100.0)).time_s(100)
        10.0
        """
        above = bisect_right(self.dims, dim)
        if above == 0:
            return self.seconds[0]
        if above == len(self.dims):
            return self.seconds[-1] * math.pow(dim / self.dims[-1], 3)
        part = math.log(dim / self.dims[above - 1]) / math.log(
            self.dims[above] / self.dims[above - 1]
        )
        return self.seconds[above - 1] * math.pow(
            self.seconds[above] / self.seconds[above - 1], part
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialInversion:
    """alpha exp(beta d), as published.

    Attributes:
        alpha_s: in seconds, > 0.
        beta_per_row: >= 0.
    """

    alpha_s: float
    beta_per_row: float

    def time_s(self, dim: int) -> float:
        return self.alpha_s * math.exp(self.beta_per_row * dim)


def slowest(samples_of_ranks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """What ranks that measured (rows -> seconds) agree on once each has everyone's: each size at
    the slowest rank's time.

    A rank that fits this has the same costs as all others, whatever it measured itself, and
    everybody waits for the slowest.

    >>> slowest([{64: 1.0, 128: 2.0}, {128: 3.0}])
    {64: 1.0, 128: 3.0}
    """
    agreed: dict[int, float] = {}
    for samples in samples_of_ranks:
        for dim, seconds in samples.items():
            agreed[dim] = max(seconds, agreed.get(dim, 0.0))
    return dict(sorted(agreed.items()))
