"""Warm-up of the density by the learning rate: while it rises, more entries travel.

What a rank owes waits for about 1 / density steps. While the learning rate rises it is applied at a
higher rate than when it was computed, and the gradients of a new model are large and all point the
same way meanwhile, so what arrives late overshoots. An entry that waits for ten steps does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DENSITY: Final = 0.1
"""The least density meanwhile."""

HOLD: Final = 50
"""How many exchanges it lasts after the learning rate has risen, so that one which rises once an
epoch of up to so many exchanges counts as rising.
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
        """Density of exchange number `exchange`, where `target` is that without a warm-up."""
        return max(DENSITY, target) if exchange < self.until else target
