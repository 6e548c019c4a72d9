"""How far predictions were off where they were held against measurements, and what follows for
others: a band on both sides, and how many cells like a new one there were.

A step's band depends on how much there is to exchange: what is exchanged beside computing slows it
down, and what nothing hides takes longer than links would need. In logarithms of measured over
predicted, the edges are linear in both shares of a step. `benchmarks/studies/_band_fit.py` fits
them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from offbeat.codec.json_objects import build

Kind = Literal["cpu", "gpu"]
"""Where bands were fitted: gloo on CPUs, NCCL on GPUs."""

_FILE: Final = Path(__file__).with_name("bands.json")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Cells of one strategy in one set.

    Attributes:
        of: the set.
        strategy: its name.
        cells: how many.
        fewest, most: workers.
        slowest, fastest: rates of links, in bit/s.
        within: what four fifths of them were off at most, as a share.
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


@cache
def band_of(kind: Kind) -> Band:
    """The band that `benchmarks/studies/bands.py --write` has fitted."""
    return build(Band, json.loads(_FILE.read_text(encoding="utf-8"))[kind])
