"""Warm-up of the density by the learning rate: while it rises, more entries travel.

What a rank owes waits for about 1 / density steps. While the learning rate rises it is applied at a
higher rate than when it was computed, and the gradients of a new model are large and all point the
same way meanwhile, so what arrives late overshoots. An entry that waits for ten steps does no harm.

The warm-up outlasts the rise. At a density below 0.01 it does so for a quarter of the time that an
entry will wait, and then comes down in two steps: at a density of 0.001, 250 exchanges at a tenth
and 600 at a hundredth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DENSITY: Final = 0.1
"""The least density meanwhile."""

HOLD: Final = 50
"""How many exchanges it lasts at least after the learning rate has risen, so that one which rises
once an epoch of up to so many exchanges counts as rising.
"""

LONG_HOLD, LONGER_HOLD, BETWEEN, LONGEST_WAIT = 0.25, 0.85, 10, 1000
"""What is added where entries wait for long, 1 / density exchanges each or `LONGEST_WAIT`: the
least density for so much of that time, and `BETWEEN` times the density until so much of it is over.
"""

LIMIT: Final = 1000
"""In this exchange and later ones, counted from 0, no learning rate begins it again."""


@dataclass(slots=True)
class RisingRate:
    """Notices that the learning rate rises.

    Attributes:
        rate: at the last exchange; 0 before the first one.
        until: the exchange, counted from 0, that is the first one after the warm-up; 0: none has
            begun.
    """

    rate: float = 0.0
    until: int = 0

    def look(self, exchange: int, rate: float) -> bool:
        """Take the learning rate of exchange number `exchange`. May be called again in the same
        exchange. Returns whether the first warm-up begins.
        """
        rises = 0.0 < self.rate < rate and exchange < LIMIT
        begins = rises and self.until == 0
        if rises:
            self.until = exchange + HOLD
        self.rate = rate
        return begins

    def density_at(self, exchange: int, target: float) -> float:
        """Density of exchange number `exchange`, where `target`, in (0, 1], is that without a
        warm-up.

        >>> [RisingRate(until=100).density_at(n, 0.001) for n in (99, 299, 300, 899, 900)]
        [0.1, 0.1, 0.01, 0.01, 0.001]
        >>> [RisingRate(until=100).density_at(n, 0.01) for n in (99, 100)]
        [0.1, 0.01]
        """
        if self.until == 0:
            return target
        hold, until = _holds(target)
        since_rise = exchange - (self.until - HOLD)
        if since_rise < hold:
            return max(DENSITY, target)
        return BETWEEN * target if since_rise < until else target


def in_words(target: float) -> str:
    """What happens to a density of `target`, in (0, 0.1).

    >>> in_words(0.01)  # doctest: +ELLIPSIS
    'while the learning rate rises, and for 50 ... after that, the density is 0.1 instead of 0.01'
    """
    hold, until = _holds(target)
    then = f", then {BETWEEN * target:.3g} for {until - hold} more" if until > hold else ""
    return (
        f"while the learning rate rises, and for {hold} exchanges after that, the density is"
        f" {DENSITY:g} instead of {target:.3g}{then}"
    )


def _holds(target: float) -> tuple[int, int]:
    """How many exchanges after the last rise the least density lasts, and the one between."""
    wait = min(1 / target, LONGEST_WAIT)
    hold = max(HOLD, round(LONG_HOLD * wait))
    return hold, max(hold, round(LONGER_HOLD * wait)) if BETWEEN * target < DENSITY else hold
