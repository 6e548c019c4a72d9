"""How long to wait for others before going on without them, learned from how long they took so far.

    deadline = median + k MAD,  within [floor, cap]

MAD is the median absolute deviation from the median. Neither is moved by a few outliers, so one
rank that was suspended does not make everyone patient, and the first steps, when caches are cold
and libraries load, are forgotten in time. Before enough is known the deadline is a guess,
`first_s`: long where a wrong suspicion is dear, short where it is cheap and taken back.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

import numpy as np

from offbeat.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How a deadline follows from the waits before it.

    Attributes:
        window: so many latest waits count, >= 1.
        min_samples: so many waits have to be known before the deadline follows from them, >= 1.
        first_s: the deadline until then, if `floor_s` and `cap_s` allow it, in seconds, >= 0.
        num_mads: k, >= 0.
        min_spread: the MAD is taken for at least this fraction of the median, >= 0: waits that were
            all alike do not promise that the next one will be.
        floor_s: the deadline is never shorter, in seconds, > 0. Longer than a busy machine may take
            to schedule a thread.
        cap_s: nor longer, in seconds, >= floor_s.
    """

    window: int = 128
    min_samples: int = 8
    first_s: float = 30.0
    num_mads: float = 8.0
    min_spread: float = 0.05
    floor_s: float = 0.25
    cap_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"Patience.{field.name} is {value}, allowed is any finite number from 0"
                )
        for name in ("window", "min_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Patience.{name} is {getattr(self, name)}, allowed is 1 or more")
        if not 0 < self.floor_s <= self.cap_s:
            raise ConfigError(
                f"Patience.floor_s is {self.floor_s}, allowed is above 0 and up to cap_s,"
                f" {self.cap_s}"
            )


def deadline_s(waits_s: Collection[float], patience: Patience) -> float:
    """How long to wait this time, in seconds.

    Args:
        waits_s: how long it took before, latest last, each >= 0; waits that ended only after a
            deadline included.
        patience: the rule.

    >>> deadline_s([], Patience())
    30.0
    >>> deadline_s([1.0] * 8 + [100.0], Patience(num_mads=4.0, min_spread=0.25))
    2.0
    """
    latest_s = np.fromiter(waits_s, dtype=np.float64, count=len(waits_s))[-patience.window :]
    if latest_s.size < patience.min_samples:
        return min(max(patience.first_s, patience.floor_s), patience.cap_s)
    median_s = float(np.median(latest_s))
    mad_s = max(float(np.median(np.abs(latest_s - median_s))), patience.min_spread * median_s)
    return min(max(median_s + patience.num_mads * mad_s, patience.floor_s), patience.cap_s)
