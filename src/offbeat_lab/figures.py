"""How values are written, in tables, sentences and pages alike: in units that people use, and with
as many digits everywhere, so that one value looks the same wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from offbeat_lab.statistics import Estimate

NOTHING: Final = "–"
"""What stands where nothing was measured."""


class Better(Enum):
    """Which way a measure is to go."""

    LOWER = -1
    HIGHER = 1
    NEITHER = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A kind of quantity.

    Attributes:
        scales: (where it begins, what to divide by, its name), ascending.
        digits: significant digits.
        most_decimals: at most so many after the point.
    """

    scales: Sequence[tuple[float, float, str]]
    digits: int = 3
    most_decimals: int = 9

    def scale_of(self, value: float) -> tuple[float, str]:
        """What to divide a value such as this by, and the name of the result."""
        fitting = [scale for scale in self.scales if scale[0] <= abs(value)] or self.scales[:1]
        chosen = (
            fitting[-1]
            if value
            else next((scale for scale in self.scales if scale[1] == 1.0), self.scales[0])
        )
        return chosen[1:]


def _prefixed(
    name: str, *prefixes: str, first: float = 1.0
) -> tuple[tuple[float, float, str], ...]:
    """Scales a thousand apart. A value that would be rounded up to the next prefix takes it."""
    powers = [first * 1000.0**number for number in range(len(prefixes))]
    return tuple(
        (0.9995 * power, power, prefix + name)
        for power, prefix in zip(powers, prefixes, strict=True)
    )


SECONDS: Final = Unit(
    (*_prefixed("s", "µ", "m", "", first=1e-6), (600.0, 60.0, "min"), (36_000.0, 3600.0, "h"))
)
BYTES: Final = Unit(_prefixed("B", "", "k", "M", "G", "T"))
BITS_PER_S: Final = Unit(_prefixed("bit/s", "", "k", "M", "G"))
SAMPLES_PER_S: Final = Unit(_prefixed("samples/s", "", "k ", "M "))
SHARE: Final = Unit(((0.0, 0.01, "%"),), digits=2, most_decimals=1)
COUNT: Final = Unit(((0.0, 1.0, ""),), digits=9, most_decimals=0)
NUMBER: Final = Unit(((0.0, 1.0, ""),), digits=4)
RATIO: Final = Unit(((0.0, 1.0, ""),))


@dataclass(frozen=True, slots=True)
class Measure:
    """A row of the table.

    Attributes:
        title: its heading; `{metric}` stands for the metric's name.
        unit: of its values.
        better: None for the metric itself, which each task sees its own way.
    """

    title: str
    unit: Unit
    better: Better | None


MEASURES: Final[dict[str, Measure]] = {
    "time_to_target_s": Measure("Time to target", SECONDS, Better.LOWER),
    "steps_to_target": Measure("Steps to target", COUNT, Better.LOWER),
    "final_metric": Measure("{metric} at the end", NUMBER, None),
    "samples_per_s": Measure("Samples a second, all workers", SAMPLES_PER_S, Better.HIGHER),
    "efficiency": Measure("Efficiency against exchanging nothing", SHARE, Better.HIGHER),
    "step_s": Measure("Time of a step", SECONDS, Better.LOWER),
    "bytes_per_step": Measure("Sent by a worker in a step", BYTES, Better.LOWER),
    "messages_per_step": Measure("Messages of a worker in a step", RATIO, Better.LOWER),
    "peak_memory_bytes": Measure("Memory of a worker at its peak", BYTES, Better.LOWER),
    "share_compute": Measure("Share of a step spent computing", SHARE, Better.NEITHER),
    "share_encode": Measure("Share spent encoding", SHARE, Better.NEITHER),
    "share_wait": Measure("Share spent waiting for others", SHARE, Better.NEITHER),
    "share_transfer": Measure("Share spent on transfer", SHARE, Better.NEITHER),
}


def write(value: float | None, unit: Unit) -> str:
    """`value` in the unit people would use for it, such as ``3.1 kB``."""
    if value is None or not math.isfinite(value):
        return NOTHING
    divisor, name = unit.scale_of(value)
    space = "" if name in ("", "%") else " "
    return f"{_round(value / divisor, unit)}{space}{name}"


def write_estimate(estimate: Estimate, unit: Unit) -> tuple[str, str]:
    """The median as `write` has it, and the interval in the same unit. That is empty where there is
    none, or none that so many digits show; of what some runs lack it says how many have it.
    """
    median, low, high = estimate.median, estimate.low, estimate.high
    text = write(median, unit)
    if median is not None and (lacking := estimate.values.count(None)):
        return text, f"in {len(estimate.values) - lacking} of {len(estimate.values)} runs"
    if median is None or low is None or high is None or not math.isfinite(low + high):
        return text, ""
    divisor, _ = unit.scale_of(median)
    ends = [_round(end / divisor, unit) for end in (low, high)]
    return text, "" if ends[0] == ends[1] else " to ".join(ends)


def capital(text: str) -> str:
    """`text` as a heading begins it."""
    return text[:1].upper() + text[1:]


def write_option(value: object) -> str:
    """A value of a configuration."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(write_option, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _round(scaled: float, unit: Unit) -> str:
    """To the unit's digits, with thousands apart, and without the minus of a zero."""
    if math.isclose(scaled, round(scaled), rel_tol=1e-9):
        return f"{round(scaled) + 0.0:,.0f}"
    magnitude = math.floor(math.log10(abs(float(f"{scaled:.{unit.digits - 1}e}"))))
    decimals = min(unit.digits - 1 - magnitude, unit.most_decimals)
    return f"{round(scaled, decimals) + 0.0:,.{max(0, decimals)}f}"
