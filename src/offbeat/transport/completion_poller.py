"""Tells when collectives under way are over, while their rank does something else: a thread polls
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from offbeat.transport.driver import Pending

EVERY_S: Final = 0.0005
"""From one poll to the next."""

_Watched: TypeAlias = tuple[Sequence[Pending[Any]], Callable[[float], None]]


class CompletionPoller:
    """Watches collectives. Its thread lives from the first one until all are over, or
    until `stop`.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._runs = False
        self._thread: threading.Thread | None = None

    def watch(self, pending: Sequence[Pending[Any]], over: Callable[[float], None]) -> None:
        """Call `over` once, on any thread, with the monotonic time at which all of `pending` were
        seen to be over.
        """
        with self._lock:
            self._watched.append((pending, over))
        if not self.poll():
            return
        with self._lock:
            if self._watched and not self._runs:
                self._runs = True
                self._thread = threading.Thread(
                    target=self._run, name="offbeat-completion-poller", daemon=True
                )
                self._thread.start()

    def poll(self) -> bool:
        """Poll now. Returns whether anything is still under way."""
        with self._lock:
            still: list[_Watched] = []
            for pending, over in self._watched:
                if all(one.ready() for one in pending):
                    over(time.monotonic())
                else:
                    still.append((pending, over))
            self._watched = still
            return bool(still)

    def stop(self) -> None:
        """Poll once more and watch nothing any longer. No thread is left."""
        self.poll()
        with self._lock:
            self._watched = []
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._stopping.clear()
            self._thread, self._runs = None, False

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self.poll()
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
