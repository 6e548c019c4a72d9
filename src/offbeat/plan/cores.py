"""Workers that share the cores of one machine, under a virtual clock: whoever computes gets an
equal share, and at most one core.

So a step takes longer the more of the other workers compute at the same time, and no longer where
they wait for messages. What carries messages takes cores too.
"""

from __future__ import annotations

from typing import Final

from offbeat.transport.operations import Collective, Sleep
from offbeat.transport.virtual import VirtualCluster
from offbeat.transport.virtual_driver import SleepUntil

DENSE_CPU_S_PER_BYTE: Final = 0.32e-9
"""gloo's all-reduce on loopback, CPU time of a rank for each byte that it sends: 0.29 to 0.36 ns
for 20 MB among 2 and 4 ranks.
"""

MESSAGE_CPU_S_PER_BYTE: Final = 2.6e-9
"""ZeroMQ with CURVE on loopback, CPU time of sender and receiver together: 2.4 to 2.9 ns (0.2 to
0.3 without encryption).
"""

MESSAGE_CPU_S: Final = 25e-6
"""Likewise for a message of 200 bytes: 22 to 29 us."""

_LEAST_S: Final = 1e-9


class Work:
    """Something that a core is needed for.

    Attributes:
        over: whether it is done.
    """

    __slots__ = ("left_s", "over", "rank")

    def __init__(self, rank: int, work_s: float) -> None:
        self.rank = rank
        self.left_s = work_s
        self.over = work_s <= 0


class Cores:
    """The cores that all ranks of `cluster` share.

    Args:
        cluster: has the clock.
        number: of them, >= 1; None: each rank has enough of its own.
    """

    def __init__(self, cluster: VirtualCluster, number: int | None) -> None:
        self.number = number
        self._cluster = cluster
        self._works: list[Work] = []
        self._since_s = 0.0
        self._num_changes = 0

    def begin(self, rank: int, work_s: float) -> Work:
        """Begin something that takes a core `work_s` seconds, on behalf of `rank`."""
        work = Work(rank, 0.0 if self.number is None else work_s)
        if not work.over:
            self._go_on()
            self._works.append(work)
            self._plan()
        return work

    def compute(self, rank: int, duration_s: float, work_s: float) -> Collective[None]:
        """Compute for `duration_s` at least, of which `work_s` take a core."""
        if self.number is None:
            yield Sleep(duration_s)
            return
        begun_s = self._cluster.now_s
        yield until_done(self.begin(rank, work_s))
        left_s = begun_s + duration_s - self._cluster.now_s
        if left_s > 0:
            yield Sleep(left_s)

    @property
    def _speed(self) -> float:
        assert self.number is not None
        return min(1.0, self.number / max(1, len(self._works)))

    def _go_on(self) -> None:
        """Count what was done since the last change."""
        done_s = (self._cluster.now_s - self._since_s) * self._speed
        for work in self._works:
            work.left_s -= done_s
        self._since_s = self._cluster.now_s

    def _plan(self) -> None:
        """Look again when the first of all is done, unless something changes before."""
        self._num_changes += 1
        change = self._num_changes
        if self._works:
            next_s = max(0.0, min(work.left_s for work in self._works)) / self._speed
            self._cluster.at(self._cluster.now_s + next_s, lambda: self._end(change))

    def _end(self, change: int) -> None:
        if change != self._num_changes:
            return
        self._go_on()
        for work in self._works:
            if work.left_s <= _LEAST_S:
                work.over = True
                self._cluster.touch(work.rank)
        self._works = [work for work in self._works if not work.over]
        self._plan()


def until_done(work: Work) -> SleepUntil:
    """Wait until `work` is done."""
    return SleepUntil(over=lambda: work.over)
