"""`interval="auto"`: average in groups as often as that costs a step no more than a share of it.

    lost = the seconds of a step in which the trainer was ready and no processor was free
    cost = lost * (processor time of averaging / processor time of the process)
    wish = a longer interval, where cost is above `budget` of a step; a shorter one, where its cost
           would be at most half of that; else the interval as it is

The wait for a processor is what the system measures of the trainer's thread (`processor_time`). So
averaging costs nothing where processors are idle, however much of them it takes.

All ranks should have the same interval, or those with a short one make the others average as often.
Each rank tells its wish in its contributions, and after each global synchronization takes the
median of the wishes that it knows. Ranks that know different wishes differ until the next one. That
costs averages and nothing else: the group of a version follows from its number
(`planning.version_numbers`), whatever interval a rank has itself, and a rank that is called takes
part. A newcomer begins with the shortest interval, and has heard all wishes after a period.
"""

from __future__ import annotations

from statistics import median_low

from offbeat.arithmetic.version_numbers import VersionNumbers

_ENOUGH = 0.5
"""An interval becomes shorter where that costs at most so much of the budget. Waits for processors
grow faster than the work, so what is measured at one interval is no exact forecast of another.
"""


def wished_interval(
    interval: int, cost: float, *, budget: float, intervals: tuple[int, ...]
) -> int:
    """The interval that a rank would have.

    Args:
        interval: at which `cost` was measured, one of `intervals`.
        cost: of the averages, as a share of a step, >= 0.
        budget: the largest cost that is accepted, > 0.
        intervals: the possible ones, ascending.

    >>> [wished_interval(2, cost, budget=0.1, intervals=(1, 2, 5)) for cost in (0.02, 0.1, 0.2)]
    [1, 2, 5]
    """
    at = intervals.index(interval)
    if cost > budget:
        return intervals[min(at + 1, len(intervals) - 1)]
    if at and cost * interval / intervals[at - 1] <= _ENOUGH * budget:
        return intervals[at - 1]
    return interval


class IntervalChoice:
    """How many steps a rank makes between two versions. Used under the lock of a `PublishedModel`.

    Args:
        numbers: of the versions, and which intervals are possible.

    Attributes:
        interval: the steps from one arrival of this rank to the next.
        wish: the interval that this rank would have; 0: any.
    """

    def __init__(self, numbers: VersionNumbers) -> None:
        self.numbers = numbers
        self.interval = min(numbers.intervals)
        self.wish = 0
        self._told = 0
        self._wishes: dict[int, int] = {}

    @classmethod
    def fixed(cls, interval: int) -> IntervalChoice:
        """An interval that nobody changes."""
        return cls(VersionNumbers(interval, (interval,)))

    def next_version(self, newest: int) -> int:
        """The version at which this rank arrives next, after `newest`."""
        return self.numbers.next_after(newest, self.interval)

    def tell(self) -> int:
        """This rank's wish, which its next contribution tells; 0: none."""
        self._told = self.wish
        return self._told

    def hear(self, member: int, wish: int) -> None:
        """Member `member` would have the interval `wish`."""
        if wish in self.numbers.intervals:
            self._wishes[member] = wish

    def forget(self, member: int) -> None:
        """Member `member` is dead."""
        self._wishes.pop(member, None)

    def begin_generation(self) -> None:
        """Members have other numbers from now on."""
        self._told = 0
        self._wishes.clear()

    def close(self, version: int) -> None:
        """`version` is closed: after a global synchronization, take the interval of the median."""
        if self.numbers.is_global(version):
            # Of its own wish this rank counts what the others have heard, or may have.
            wishes = [wish for wish in (self._told, *self._wishes.values()) if wish]
            self.interval = median_low(wishes) if wishes else self.interval
