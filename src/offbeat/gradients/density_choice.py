"""`density="auto"`: as many entries as may travel without slowing training by more than a share of
a step.

    compute = the slowest rank's median seconds between two exchanges
    allowed = budget * compute; ten times that in the first 100 exchanges, five times in the next
              50, and two and a half times in the 50 after these
    least = the cheapest exchange at the paper's density
    allowed = max(allowed, 1.5 * least)
    dense, where that costs at most `allowed`; else the largest density whose cheapest exchange does

What `least` costs no density avoids. Where most of it is latency, many more entries cost hardly
more, and withholding them would lose accuracy for nothing.

The first exchanges may cost more, because gradients change quickly there: what is owed from then is
applied when the model has left, and harms for long (`benchmarks/sparse_accuracy.py`). From there
the density goes down by steps.

The seconds between exchanges are measured all the time, and looked at after a few exchanges and
then now and then, by all ranks together. The links are measured in `attach`, and again at these
later looks, as far as that takes at most a hundredth of the time.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, ClassVar, Final

from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.gradients.collective_choice import BucketKind, CheapestCollective
from offbeat.gradients.exchange import ExchangeListener
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, Collective

LEAST: Final = 0.001
"""The least density that is chosen: the paper's."""

NEAR_LEAST: Final = 1.5
"""An exchange may always cost so many times what one at `LEAST` does."""

FEW: Final = 0.02
"""The largest density that is chosen where the optimizer's scaling is taken over: fewer entries
were more accurate there on a text, and as accurate on photographs.
"""

FIRST: Final = 0.2
"""The density until the first choice. Momentum goes on as it is there: where it is applied at once
in the first exchanges, and more travels afterwards, a new model is harmed.
"""

WARM_UP: Final = ((100, 10.0), (150, 5.0), (200, 2.5))
"""Before that exchange so many times the budget may be spent."""

_STEP: Final = 1.25
"""Densities that are tried differ by this factor."""

_CHANGE: Final = 1.5
"""A new density differs from the old by at least this factor, so that it does not flutter with the
measurements.
"""

_EARLY: Final = (4, 20, *(end for end, _ in WARM_UP))
_INTERVAL: Final = 500
_REMEMBERED: Final = 20
_MEASURING: Final = 0.01
"""Share of the time between exchanges that measuring the links again may take."""

_SECONDS: Final = struct.Struct("<d")


def warm_up_factor(num_exchanges: int) -> float:
    """What the budget is multiplied by after so many exchanges; 1.0 when the warm-up is over.

    >>> [warm_up_factor(number) for number in (0, 99, 100, 150, 200)]
    [10.0, 10.0, 5.0, 2.5, 1.0]
    """
    return next((factor for end, factor in WARM_UP if num_exchanges < end), 1.0)


def affordable_density(
    costs_s: Callable[[int], Mapping[str, float]],
    *,
    num_elements: int,
    allowed_s: float,
    most: float = 1.0,
) -> float:
    """The largest density whose exchange takes at most `allowed_s`, or `NEAR_LEAST` times as long
    as one at `LEAST`; 1.0 where a dense one does.

    Args:
        costs_s: k -> expected seconds of one exchange by collective, "dense" among them.
        num_elements: of the gradient.
        allowed_s: seconds.
        most: the largest density that is considered.

    Returns:
        A density in [`LEAST`, `most`].
    """

    def sparse_s(density: float) -> float:
        costs = costs_s(max(1, round(density * num_elements)))
        return min(cost for name, cost in costs.items() if name != "dense")

    allowed_s = max(allowed_s, NEAR_LEAST * sparse_s(LEAST))
    if most == 1.0 and costs_s(num_elements)["dense"] <= allowed_s:
        return 1.0
    density = LEAST
    while (larger := density * _STEP) < most and sparse_s(larger) <= allowed_s:
        density = larger
    return density


class Intervals(ExchangeListener):
    """Measures the seconds from the end of one exchange to the beginning of the next.

    Args:
        over: is called at the end of each exchange.
        now_s: a monotonic clock.
    """

    def __init__(self, over: Callable[[], None], now_s: Callable[[], float]) -> None:
        self._over = over
        self._now_s = now_s
        self._ended_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def median_s(self) -> float:
        """Of the last ones; 0 where there is none yet."""
        return median(self._recent_s) if self._recent_s else 0.0

    @override
    def on_bucket_sealed(self, number: int, *, is_last: bool, failed: bool) -> None:
        if is_last and self._ended_s is not None:
            self._recent_s.append(self._now_s() - self._ended_s)

    @override
    def on_exchange_settled(self, *, good: bool) -> None:
        self._over()
        self._ended_s = self._now_s()


class AutoDensity(Callback):
    """The part behind `density="auto"`.

    The density steers the numbers that training sees, so it is state: a resumed run begins with
    that of the first one.

    Args:
        cheapest: knows what exchanges cost.
        gradient: all buckets as one.
        budget: share of the seconds between exchanges that an exchange may take, > 0.
        driver: carries out the agreement.
        stream: for it.
        inform: is told what was chosen.
        now_s: a monotonic clock.

    Attributes:
        density: of the next exchange.
        intervals: has to listen to the exchange of gradients.
    """

    state_key: ClassVar[str] = "density_choice"

    def __init__(
        self,
        cheapest: CheapestCollective,
        *,
        gradient: BucketKind,
        budget: float,
        driver: Driver,
        stream: Stream,
        inform: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.density = FIRST
        self._cheapest = cheapest
        self._gradient = gradient
        self._budget = budget
        self._driver = driver
        self._stream = stream
        self._inform = inform
        self._num_exchanges = 0
        self._num_since_measured = 0
        self._most = 1.0
        self.intervals = Intervals(self._exchange_over, now_s)

    def send_few(self) -> None:
        """Choose no density above `FEW` from now on. All ranks call it between the same two
        exchanges.
        """
        self._most = FEW
        self.density = min(self.density, FEW)

    def _exchange_over(self) -> None:
        # All ranks settle the same exchanges, so all of them come to the agreement here.
        self._num_exchanges += 1
        self._num_since_measured += 1
        if self._num_exchanges in _EARLY or self._num_exchanges % _INTERVAL == 0:
            self._choose()

    def _choose(self) -> None:
        compute_s = self._driver.run(_slowest(self.intervals.median_s), self._stream.next())
        if compute_s == 0.0:  # right after a resume no rank has measured anything
            return
        self._look_at_links(compute_s)
        share = self._budget * warm_up_factor(self._num_exchanges)
        allowed_s = share * compute_s
        density = affordable_density(
            lambda k: self._cheapest.costs_s(self._gradient, k),
            num_elements=self._gradient.num_elements,
            allowed_s=allowed_s,
            most=self._most,
        )
        if density != 1.0 and 1 / _CHANGE < density / self.density < _CHANGE:
            return
        if density == self.density:
            return
        self.density = density
        k = max(1, round(density * self._gradient.num_elements))
        costs = self._cheapest.costs_s(self._gradient, k)
        expected_s = costs["dense"] if density == 1.0 else min(costs.values())
        chosen = "to send everything" if density == 1.0 else f"{density:.3g}"
        self._inform(
            f'density="auto" chose {chosen} after {self._num_exchanges} exchanges:'
            f" {expected_s * 1e3:.2f} ms expected, {allowed_s * 1e3:.2f} ms allowed, which is"
            f" {share:.0%} of the {compute_s * 1e3:.1f} ms between exchanges"
            + ("; fewer entries would hardly cost less" if expected_s > allowed_s else "")
            + next(
                (f" until exchange {end}" for end, _ in WARM_UP if self._num_exchanges < end), ""
            )
        )

    def _look_at_links(self, compute_s: float) -> None:
        """All ranks do, or none: what this depends on they have agreed on."""
        passed_s = self._num_since_measured * compute_s
        if self._num_exchanges % _INTERVAL or _MEASURING * passed_s < self._cheapest.again_s:
            return
        self._num_since_measured = 0
        k = max(1, round(self.density * self._gradient.num_elements))
        self._cheapest.look_again(self._gradient, k)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"density": self.density, "num_exchanges": self._num_exchanges}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.density = float(state["replicated"]["density"])
        self._num_exchanges = int(state["replicated"]["num_exchanges"])


def _slowest(mine_s: float) -> Collective[float]:
    """The largest of what the ranks have measured."""
    reports = yield AllGather(_SECONDS.pack(mine_s))
    return max(float(_SECONDS.unpack(report)[0]) for report in reports)
