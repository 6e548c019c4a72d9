"""What averages cost the thread that trains: how long it waited for a processor because of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from offbeat.transport.threads import thread_time, transport_threads


class ProcessorTime(NamedTuple):
    """Since the threads began, in seconds.

    Attributes:
        now_s: of the monotonic clock.
        waited_s: how long the thread that trains waited for a processor.
        averaging_s: the processor time of the threads that average, send and receive.
        process_s: the processor time of the whole process.
    """

    now_s: float
    waited_s: float
    averaging_s: float
    process_s: float

    def cost_since(self, earlier: ProcessorTime) -> float:
        """The share of the time since `earlier` that the trainer lost to averages, in [0, 1]."""
        passed_s, process_s = self.now_s - earlier.now_s, self.process_s - earlier.process_s
        if passed_s <= 0 or process_s <= 0:
            return 0.0
        # A thread that has ended since takes its time out of the sum.
        averaging_s = max(0.0, self.averaging_s - earlier.averaging_s)
        share = min(1.0, averaging_s / process_s)
        return min(1.0, max(0.0, self.waited_s - earlier.waited_s) * share / passed_s)


def read_processor_time(trainer: int, averaging: Iterable[int]) -> ProcessorTime | None:
    """What the system has counted; None where it does not count.

    Args:
        trainer: the native identifier of the thread that trains.
        averaging: those of the threads that average.
    """
    mine = thread_time(trainer)
    if mine is None:
        return None
    others = [thread_time(thread) for thread in transport_threads() | {*averaging}]
    averaging_s = sum(other.ran_s for other in others if other is not None)
    return ProcessorTime(time.monotonic(), mine.waited_s, averaging_s, time.process_time())
