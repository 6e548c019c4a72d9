"""Emulated compute, by sleeping: workers that are late, workers that are slow, and steps as long as
an accelerator's.

    sleep the straggling delay of this step
    forward
    sleep until forward and the coming backward together take what the cluster says
    backward

The pad comes before the backward pass, so that what a strategy overlaps with the backward pass
still overlaps with it. How long the coming one will take is not known; it is taken to need as much
CPU time for each sample as the one before, less what the strategy itself computed in it, which an
emulated accelerator would not do for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from offbeat.run.step_recorder import StepTime
from offbeat_lab.cluster import Cluster


class StepTimeEmulator(StepTime):
    """Makes one worker's steps as long as the cluster says.

    Args:
        cluster: None changes nothing.
        rank: of this worker.
        by_sleeping: whether a lower speed is to be imitated here, since no CPU quota does it.
    """

    def __init__(self, cluster: Cluster | None, rank: int, *, by_sleeping: bool) -> None:
        self._cluster = cluster
        self._rank = rank
        self._by_sleeping = by_sleeping
        self._backward_cpu_s = self._backward_s = 0.0
        self._began_s = 0.0
        self._size = 1.0
        self.slept_s = 0.0
        """Seconds slept in the current step."""
        self.num_late = 0
        """Steps whose own computing already took longer than it was to take altogether."""

    @override
    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins. Sleep first, if this worker is to be late in it."""
        self.slept_s = 0.0
        if self._cluster is not None:
            self._sleep(self._cluster.delay_s(self._rank, step))
        self._began_s = time.monotonic()

    @override
    def before_backward(self, elapsed_s: float, *, size: float = 1.0) -> None:
        """The forward pass is done.

        Args:
            elapsed_s: training time so far, which decides about speeds that change.
            size: of this batch in usual ones; an accelerator takes so many times as long for it.
        """
        cluster = self._cluster
        if cluster is None:
            return
        forward_s, speed = time.monotonic() - self._began_s, cluster.speed_at(self._rank, elapsed_s)
        backward_s = self._backward_cpu_s * size / self._size
        self._size = size
        if cluster.step_s is not None:
            left_s = cluster.step_s * size / speed - forward_s - backward_s
            self.num_late += left_s < 0
            self._sleep(left_s)
        elif self._by_sleeping:
            self._sleep((forward_s + backward_s) * (1 / speed - 1))

    @override
    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward pass, to learn how long the next one will take."""
        if self._cluster is None:
            yield
            return
        before_s, before_cpu_s = time.monotonic(), time.thread_time()
        yield
        self._backward_s = time.monotonic() - before_s
        self._backward_cpu_s = time.thread_time() - before_cpu_s

    @override
    def exclude_overhead(self, encode_s: float, wait_s: float) -> None:
        """Of the last backward pass, the strategy's own work took `encode_s`, and `wait_s` were
        spent waiting.

        Both by the clock: where more workers than cores compute, that is more than the CPU time
        that encoding took.
        """
        busy_s = self._backward_s - wait_s
        if busy_s > 0:
            self._backward_cpu_s *= max(0.0, 1 - encode_s / busy_s)

    def _sleep(self, duration_s: float) -> None:
        if duration_s > 0:
            begun_s = time.monotonic()
            time.sleep(duration_s)
            self.slept_s += time.monotonic() - begun_s
