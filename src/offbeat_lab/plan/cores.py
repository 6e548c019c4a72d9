"""Workers that share the cores of one machine, under a virtual clock: whoever computes has a core
for a slice of time, as an operating system gives it, and then it is the turn of whoever has waited
longest.

So a step takes longer the more of the other workers compute at the same time, and no longer where
they wait for messages. Whoever needs less than a slice is not interrupted, so workers that were
held up by each other once begin their next steps one after the other, and hold each other up no
more. What carries messages takes cores too.
"""

from __future__ import annotations

from collections import deque
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

MESSAGE_WAKE_S: Final = 0.4e-3
"""How long a message takes to come from one process to another where both wait on cores that they
share: what `GTopK(collective="auto")` probed on emulated links with 2 to 8 workers on 2 cores was
0.3 to 0.66 ms.
"""

DENSE_WAKE_S: Final = 1e-3
"""Likewise of a round of gloo's all-reduce, whose threads hand each message on: SPD-KFAC's sums of
a few hundred bytes beside training took 0.3 to 2.6 ms a round there.
"""

SLICE_S: Final = 4e-3
"""A tick of a kernel that has 250 of them a second, as most do: it looks who is next at a tick."""

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
        self._waiting: deque[Work] = deque()
        self._num_busy = 0
        self._left_of_slice_s: dict[int, float] = {}

    def begin(self, rank: int, work_s: float) -> Work:
        """Begin something that takes a core `work_s` seconds, on behalf of `rank`."""
        work = Work(rank, 0.0 if self.number is None else work_s)
        if not work.over:
            # Whoever goes on at once keeps its core.
            if rank in self._left_of_slice_s:
                self._waiting.appendleft(work)
            else:
                self._waiting.append(work)
            self._cluster.at(self._cluster.now_s, self._assign)
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

    def _assign(self) -> None:
        """Give free cores to those who wait."""
        assert self.number is not None
        while self._waiting and self._num_busy < self.number:
            work = self._waiting.popleft()
            slice_s = self._left_of_slice_s.pop(work.rank, SLICE_S)
            self._run(work, min(work.left_s, slice_s), slice_s)
        self._left_of_slice_s.clear()

    def _run(self, work: Work, duration_s: float, slice_s: float) -> None:
        self._num_busy += 1

        def stop() -> None:
            self._num_busy -= 1
            work.left_s -= duration_s
            if work.left_s <= _LEAST_S:
                work.over = True
                self._cluster.touch(work.rank)
                if slice_s - duration_s > _LEAST_S:
                    self._left_of_slice_s[work.rank] = slice_s - duration_s
            else:
                self._waiting.append(work)
            # Behind what the rank does next at this moment.
            self._cluster.at(self._cluster.now_s, self._assign)

        self._cluster.at(self._cluster.now_s + duration_s, stop)


def until_done(work: Work) -> SleepUntil:
    """Wait until `work` is done."""
    return SleepUntil(over=lambda: work.over)
