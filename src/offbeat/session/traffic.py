"""What a session has moved: by the trainer's thread, and by threads of its callbacks."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.transport.driver import Counting, Driver
from offbeat.transport.operations import Traffic


class SessionTraffic:
    """Counts the traffic of a driver, and of the drivers that callbacks use in threads of their
    own.

    Args:
        driver: the trainer's.
        wrap: put around each background driver before it is counted.

    Attributes:
        counting: the trainer's driver, counted.
    """

    def __init__(self, driver: Driver, *, wrap: Callable[[Driver], Driver]) -> None:
        self.counting = Counting(driver)
        self._wrap = wrap
        self._background: Counting | None = None
        self._of_earlier_drivers = Traffic()

    def count_in_background(self, driver: Driver) -> Driver:
        """`driver`, counted with the session's traffic. Each generation of members has a driver of
        its own; of those before this one only the counts are kept.
        """
        self._of_earlier_drivers = self._of_background()
        self._background = Counting(self._wrap(driver), in_background=True)
        return self._background

    def restart(self) -> None:
        """Count from 0: what setting up took, such as measuring the links, is not training."""
        self.counting.restart()
        if self._background is not None:
            self._background.restart()

    def total(self) -> Traffic:
        """Everything since `restart`."""
        return self.counting.traffic.plus(self._of_background())

    def _of_background(self) -> Traffic:
        before, now = self._of_earlier_drivers, self._background
        return before if now is None else before.plus(now.traffic)
