"""Ctrl-C, SIGTERM and SIGHUP as something to be counted, so that an interrupted process can end
what it has begun.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

_FIRST_SAYS: Final = b"offbeat: workers save and stop; asked once more, they are ended at once\n"


@dataclass(kw_only=True, slots=True)
class Interrupts:
    """How often this process was asked to stop, and by which signal the last time."""

    count: int = 0
    number: int = signal.SIGTERM


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Count requests to stop in place of being ended by them, and say at the first one what a
    second one does. Elsewhere than in the main thread, only watch workers.
    """
    interrupted = Interrupts()

    def count(number: int) -> None:
        if not interrupted.count:
            with suppress(OSError):
                os.write(2, _FIRST_SAYS)  # a handler may have interrupted a print
        interrupted.count += 1
        interrupted.number = number

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    with stop_requests(count):
        yield interrupted


@contextmanager
def stop_requests(heed: Callable[[int], object]) -> Iterator[None]:
    """Call `heed` with the number of the signal at SIGINT, SIGTERM and SIGHUP, in place of ending
    this process. A SIGHUP that is ignored, as under nohup, stays so. Only in the main thread.
    """
    handle = _heeding(heed)
    before = {number: signal.signal(number, handle) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_at_stop_signals() -> None:
    """Make the first SIGTERM or SIGHUP end this process as `sys.exit` does, so that what it has set
    up is taken down; by default they end it at once. Slurm and systemd send a worker one, beside
    that of its supervisor: a second one must not end the first one's checkpoint.
    """
    leaving: set[int] = set()

    def leave(number: int) -> None:
        if (process := os.getpid()) not in leaving:  # one that is forked meanwhile is another
            leaving.add(process)
            sys.exit(128 + number)

    for number in _stop_signals():
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _heeding(leave))


def _heeding(heed: Callable[[int], object]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        heed(number)

    return handle


def _stop_signals() -> list[signal.Signals]:
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


def _leave_terminal() -> None:
    """Print to nowhere from now on where the terminal is gone: a write to it would raise, in the
    midst of a checkpoint.
    """
    for descriptor in (1, 2):
        with suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):  # the terminal was closed
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
