"""The density of each exchange, which is the fraction of the entries that travels; and by which
collective they do.

    target      a number, or the largest that the links afford (`MeasuredDensity`)
    warm-up     stages that the user has named, or more while the learning rate rises

Warm-up by the learning rate. What a rank owes waits for about 1 / density steps. While the learning
rate rises it is applied at a higher rate than when it was computed, and the gradients of a new
model are large and all point the same way meanwhile, so what arrives late overshoots. An entry that
waits for ten steps does no harm.

The warm-up outlasts the rise. At a density below 0.01 it does so for a quarter of the time that an
entry will wait, and then comes down in two steps: at a density of 0.001, 250 exchanges at a tenth
and 600 at a hundredth.
Without it images are 1.9 points worse (`benchmarks/parity.py`, images, GTopK at 0.01, two seeds).

What the links afford:

    compute = the slowest rank's median seconds between two exchanges
    allowed = `BUDGET` * compute; ten times that in the first 100 exchanges, five times in the next
              50, and two and a half times in the 50 after these
    least = the cheapest exchange at the paper's density
    allowed = max(allowed, 1.5 * least)
    dense, where that costs at most `allowed`; else the largest density whose cheapest exchange does

An exchange costs what its messages take, and what a processor takes to select, write, read and add
its entries: on fast links most of it. Where that did not count, two thirds of a million entries
were chosen at 10 Gbit/s, and steps took twice as long as `AllReduce`'s (`benchmarks/auto.py`).

What `least` costs no density avoids. Where most of it is latency, many more entries cost hardly
more, and withholding them would lose accuracy for nothing. With a density of 0.01 in its place
mnist is 0.8 points worse (`benchmarks/parity.py`, mnist, GTopK), and all at once instead of by
steps 1.1 points on images (`benchmarks/sparse_accuracy.py`, density 0.07): gradients change quickly
in the first exchanges, and what is owed from then is applied when the model has left.

The seconds between exchanges are measured all the time, and looked at after a few exchanges and
then now and then, by all ranks together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar, Final, Literal

from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.dense import gather_values
from offbeat.gradients.collective_choice import COLLECTIVES, BucketKind, CheapestCollective
from offbeat.gradients.exchange import ExchangeListener, GradientTransform
from offbeat.gradients.parameter_groups import rates_of
from offbeat.gradients.reductions import ExchangePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """Densities of the first stages of training.

    Args:
        stages: of each the density, in (0, 1], and for how many steps, >= 1.
    """

    stages: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("there is no stage")
        for density, steps in self.stages:
            if not (0 < density <= 1 and steps >= 1):
                raise ValueError(f"a stage has density {density!r} for {steps!r} steps")

    def density_at(self, step: int, target: float) -> float:
        """Density of step `step`, counted from 0: the stage's, but never below `target`, which
        holds after the last stage.

        >>> Warmup(stages=((0.5, 10), (0.1, 20))).density_at(12, 0.001)
        0.1
        """
        end = 0
        for density, steps in self.stages:
            end += steps
            if step < end:
                return max(density, target)
        return target

    @classmethod
    def of(cls, pairs: Iterable[Iterable[float]] | str) -> Warmup:
        """Of pairs of a density and a number of steps, or text such as "1.0x80+0.25x40": 80 steps
        at density 1, then 40 at 0.25. Raises `TypeError` or `ValueError` where they are something
        else.
        """
        if isinstance(pairs, str):
            pairs = [map(float, stage.split("x")) for stage in pairs.split("+")]
        stages = []
        for density, steps in pairs:
            if not math.isfinite(steps) or int(steps) != steps:
                raise ValueError(f"{steps!r} is no number of steps")
            stages.append((float(density), int(steps)))
        return cls(stages=tuple(stages))


DENSITY: Final = 0.1
"""The least density meanwhile."""

HOLD: Final = 50
"""How many exchanges it lasts at least after the learning rate has risen, so that one which rises
once an epoch of up to so many exchanges counts as rising.
"""

LONG_HOLD, LONGER_HOLD, BETWEEN, LONGEST_WAIT = 0.25, 0.85, 10, 1000
"""What is added where entries wait for long, 1 / density exchanges each or `LONGEST_WAIT`: the
least density for so much of that time, and `BETWEEN` times the density until so much of it is over.
Without, images are 1.2 points worse (`benchmarks/sparse_accuracy.py`, 3000 steps, density 0.001).
"""

START: Final = 20
"""So many exchanges bring everything where Adam's scaling is to be taken over afterwards: until
then Adam works as ever (`benchmarks/studies/adam_rules.py`, at once). More were not better.
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
        # One that began before `LIMIT` goes on: the warm-up of a large model takes many more.
        may_rise = exchange < LIMIT or exchange < self.until
        rises = may_rise and 0.0 < self.rate < rate
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


AT_ONCE: Final = 0.15
"""Below this density SGD's momentum is applied at once: an entry waits for 1 / density exchanges,
and momentum is usually spread over ten. And Adam's scaling is taken over. Without the one
images are 4 points worse (`benchmarks/sparse_accuracy.py`, momentum spread), without the other text
is 11% of bits worse (`benchmarks/parity.py`, text, GTopK at 0.01).
"""


class DensitySchedule(Callback):
    """The density of each exchange, on the way to a target, and its collective.

    The learning rate steers the density, so what was seen of it is state.

    Args:
        target: the density without a warm-up, in (0, 1].
        context: lent by the session. The learning rate of its optimizer counts, the same on all
            ranks, and its island has the same density and collective, whatever the sizes of shards.
        warmup: its stages; "auto": by the learning rate; None: there is none.
        collective: by which entries are merged; None: everything is sent, densely.
        cheapest: chooses another one for each bucket and number of entries; None: nothing does.

    Attributes:
        listener: has to listen to the exchange of gradients.
    """

    state_key: ClassVar[str] = "density"

    def __init__(
        self,
        target: float,
        context: Context,
        *,
        warmup: Warmup | Literal["auto"] | None,
        collective: SparseCollective | None = None,
        cheapest: CheapestCollective | None = None,
    ) -> None:
        self.target = self._few = target  # `_few`: once `send_few` has been called
        self._island, self._inform = context.island, context.notices.inform
        self.listener = ExchangeListener()
        # A density of 1 that the user named for the whole run goes through the collective that the
        # user named; one that was chosen, or begins a warm-up, need not.
        self._is_named_dense = target == 1.0
        self._collective, self._cheapest = collective, cheapest
        self._transform = GradientTransform(None)
        self._largest: BucketKind | None = None
        self._warmup = warmup
        self._optimizer = context.optimizer
        self._rising = RisingRate()

    def follow(self, transform: GradientTransform, *, largest: BucketKind) -> None:
        """Learn what works before the exchange, and let it know how much travels.

        Args:
            transform: says whether more entries have to travel while the learning rate rises.
            largest: of the buckets.
        """
        elements = self._island.first(largest.num_elements)
        self._transform, self._largest = transform, largest._replace(num_elements=elements)
        transform.follow(self)

    def plan(self, bucket: BucketKind) -> ExchangePlan:
        """What the coming exchange of a bucket does."""
        density = self.now()
        k = max(1, round(density * bucket.num_elements))
        everything = density == 1.0 and not self._is_named_dense
        return ExchangePlan(k=k, collective=None if everything else self._merges(bucket, density))

    def _merges(self, bucket: BucketKind, density: float) -> SparseCollective | None:
        if self._cheapest is None:
            return self._collective
        if self._island.size > 1:  # whose ranks have buckets of different sizes
            assert self._largest is not None
            bucket = self._largest
        k = max(1, round(density * bucket.num_elements))
        return COLLECTIVES[self._cheapest.choose(bucket, k)]

    def _sends_entries(self, density: float) -> bool:
        assert self._largest is not None
        return self._merges(self._largest, density) is not None

    def sends_few(self) -> bool:
        """Whether so little travels in the coming exchange that momentum may be applied at once."""
        return (now := self.now()) < AT_ONCE and self._sends_entries(now)

    def sends_entries(self) -> bool:
        """Whether it is entries that travel once `send_few` has been called, and not all of the
        gradient. The same on all ranks.
        """
        return self._sends_entries(self._few)

    def begins(self) -> bool:
        """Whether training begins, as far as Adam is concerned: in the coming exchange everything
        travels, or at least so much that Adam is not to be replaced.
        """
        exchange = self._transform.counts.exchanges
        if isinstance(self._warmup, Warmup):
            return self._warmup.density_at(exchange, 0.0) >= AT_ONCE
        return self._warmup == "auto" and exchange < START

    def now(self) -> float:
        """Of the coming exchange."""
        exchange = self._transform.counts.exchanges
        if self._warmup == "auto" and self._transform.is_taken is None and self.begins():
            return 1.0
        if isinstance(self._warmup, Warmup):
            return self._warmup.density_at(exchange, self.target)
        if self._warmup is None or self._optimizer is None or not self._transform.needs_warm_up:
            return self.target
        rate = max(rates_of(self._optimizer))
        if self._rising.look(exchange, rate) and self.target < DENSITY:
            self._inform(f"warmup='auto': {in_words(self.target)}; warmup=None keeps it as it is")
        return self._rising.density_at(exchange, self.target)

    def send_few(self) -> None:
        """Adam's scaling is taken over: what is measured is at most `FEW` from now on. All ranks
        call it between the same two exchanges.
        """

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"learning_rate": self._rising.rate, "until": self._rising.until}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["replicated"]
        self._rising = RisingRate(float(saved["learning_rate"]), int(saved["until"]))


BUDGET: Final = 0.1
"""Share of the time between two exchanges that one may take, where entries are chosen by cost."""

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


class MeasuredDensity(DensitySchedule):
    """The largest density that the links afford: `density="auto"`.

    What was chosen steers the numbers that training sees, so it is state: a resumed run begins with
    that of the first one.

    Args:
        costs: knows what exchanges cost.
        context: lent by the session.
        gradient: all buckets as one.
        schedule: the other arguments of `DensitySchedule`.
    """

    def __init__(
        self, costs: CheapestCollective, context: Context, *, gradient: BucketKind, **schedule: Any
    ) -> None:
        super().__init__(FIRST, context, **schedule)
        self._costs, self._gradient = costs, gradient
        self._driver, self._stream = context.driver, context.new_stream()
        self._num_exchanges = 0
        self._most, self._few = 1.0, FEW
        clock = partial(context.driver.now_s, context.new_stream().next())
        self.listener = self._intervals = Intervals(self._exchange_over, clock)

    @override
    def send_few(self) -> None:
        self._most = FEW
        self.target = min(self.target, FEW)

    def _exchange_over(self) -> None:
        # All ranks settle the same exchanges, so all of them come to the agreement here.
        self._num_exchanges += 1
        if self._num_exchanges in _EARLY or self._num_exchanges % _INTERVAL == 0:
            self._choose()

    def _choose(self) -> None:
        medians_s = gather_values(self._intervals.median_s)
        compute_s = self._island.first(max(self._driver.run(medians_s, self._stream.next())))
        if compute_s == 0.0:  # right after a resume no rank has measured anything
            return
        share = BUDGET * warm_up_factor(self._num_exchanges)
        allowed_s = share * compute_s
        density = affordable_density(
            lambda k: self._costs.costs_s(self._gradient, k),
            num_elements=self._gradient.num_elements,
            allowed_s=allowed_s,
            most=self._most,
        )
        if density != 1.0 and 1 / _CHANGE < density / self.target < _CHANGE:
            return
        if density == self.target:
            return
        self.target = density
        k = max(1, round(density * self._gradient.num_elements))
        costs = self._costs.costs_s(self._gradient, k)
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

    @override
    def state_dict(self) -> dict[str, Any]:
        chosen = {"density": self.target, "num_exchanges": self._num_exchanges}
        return {"replicated": super().state_dict()["replicated"] | chosen}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.target = float(state["replicated"]["density"])
        self._num_exchanges = int(state["replicated"]["num_exchanges"])
