"""How the versions of rotating groups are numbered, where ranks may change the interval between two
group averages while they train.

A period of steps ends with a global synchronization. Before it there are group averages after every
so many steps: the interval, a divisor of the period. A version's number says after which step of
the period it is and which interval it belongs to. So a rank that hears of a version knows its group
from the number alone, also where the rank that began it averages at another interval.

    period 4, intervals 1 and 2
    step       1     2     2     3     4
    interval   1     1     2     1     all ranks
    number     0     1     2     3     4        then 5, 6, ... in the next period

Where there is one interval only the numbers are consecutive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from offbeat.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VersionNumbers:
    """The numbers of the versions.

    Args:
        period: the number of steps from one global synchronization to the next, >= 1.
        intervals: the numbers of steps between group averages that are possible, divisors of
            `period`; at least one.

    Raises:
        ConfigError: an argument is out of range.

    >>> numbers = VersionNumbers(4, (1, 2))
    >>> [numbers.next_after(version, 2) for version in (-1, 0, 1, 2, 3, 4)]
    [2, 2, 4, 4, 4, 7]
    """

    period: int
    intervals: Collection[int] = (1,)
    _slots: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    _numbers: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        wrong = [each for each in self.intervals if each < 1 or self.period % each]
        if self.period < 1 or not self.intervals or wrong:
            raise ConfigError(
                f"intervals are {sorted(self.intervals)} with a period of {self.period}, allowed"
                " are divisors of the period, one or more"
            )
        of_groups = {(at, each) for each in self.intervals for at in range(each, self.period, each)}
        # The global synchronization belongs to no interval.
        slots = (*sorted(of_groups), (self.period, self.period))
        object.__setattr__(self, "_slots", slots)
        object.__setattr__(self, "_numbers", {slot: i for i, slot in enumerate(slots)})

    @property
    def in_a_period(self) -> int:
        """How many numbers a period has."""
        return len(self._slots)

    def is_global(self, version: int) -> bool:
        """Whether all ranks average in `version`."""
        return (version + 1) % self.in_a_period == 0

    def rotation(self, version: int) -> int:
        """How many group averages there were before `version` if its interval was never another."""
        step, interval = self._step_and_interval(version)
        return step // interval - 1

    def next_after(self, version: int, interval: int) -> int:
        """The first version of `interval` that is after a later step than `version` is.

        Args:
            version: a version, or -1 before the first one.
            interval: one of `intervals`.
        """
        step, _ = self._step_and_interval(version)
        periods, rest = divmod(step, self.period)
        at = (rest // interval + 1) * interval
        slot = (at, interval) if at < self.period else (self.period, self.period)
        return periods * self.in_a_period + self._numbers[slot]

    def _step_and_interval(self, version: int) -> tuple[int, int]:
        """After which step of the group `version` is, and its interval."""
        periods, index = divmod(version, self.in_a_period)
        at, interval = self._slots[index]
        return periods * self.period + at, interval
