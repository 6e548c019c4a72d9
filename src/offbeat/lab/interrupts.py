"""Ctrl-C and SIGTERM as something to be counted, so that an interrupted process can end what it
has begun.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(kw_only=True, slots=True)
class Interrupts:
    """How often this process was asked to stop."""

    count: int = 0


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Count SIGINT and SIGTERM in place of being ended by them. Elsewhere than in the main thread,
    only watch workers.
    """
    interrupted = Interrupts()

    def count(number: int, frame: FrameType | None) -> None:
        interrupted.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
