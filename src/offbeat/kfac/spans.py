"""Notes what K-FAC does within a step and when. It does so in few steps: in all of them it would
cost time, and fill the record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch

from offbeat.callbacks.profile import Span
from offbeat.transport.driver import Pending

EVERY_S: Final = 0.0005
"""From one poll to the next."""

_Watched: TypeAlias = tuple[Sequence[Pending[Any]], Callable[[float], None]]


MAX_SPANS: Final = 4096
"""Of one step; what comes later is not noted."""


class CompletionPoller:
    """Tells when collectives are over, while their rank does something else. Its thread, which
    polls them, lives from the first one until all are over, or until `stop`.
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


class SpanRecorder:
    """Notes what is done, in steps that were chosen for it."""

    def __init__(self) -> None:
        self.on = False
        """Whether this step is looked at."""
        self._spans: list[Span] = []
        self._finished: list[Span] = []
        self._poller = CompletionPoller()

    def begin(self, *, on: bool, keep: bool = True) -> None:
        """A step begins, to be looked at or not. What was noted in the one before is kept, or not,
        for `take`.
        """
        self._poller.stop()
        self.on = on
        if self._spans and keep:
            self._finished = self._spans
        self._spans = []

    def add(self, kind: str, what: str, began_s: float) -> None:
        """Something that began at `began_s` has just ended."""
        if self.on:
            self._note(Span(kind, what, began_s, time.monotonic()))

    @contextmanager
    def timed(self, kind: str, what: str = "") -> Iterator[None]:
        """Around something."""
        began_s = time.monotonic()
        yield
        self.add(kind, what, began_s)

    def launched(
        self, kind: str, what: str, began_s: float, pending: Sequence[Pending[torch.Tensor]]
    ) -> None:
        """Messages that belong together have been launched. They are under way until they are seen
        to be over.

        Args:
            kind: what sort of messages.
            what: which ones.
            began_s: when the launch began, on the monotonic clock.
            pending: the messages.
        """
        if self.on:
            self._poller.watch(
                pending, lambda over_s: self._note(Span(kind, what, began_s, over_s))
            )

    def arrived(self) -> None:
        """This rank has waited for some of what was launched."""
        self._poller.poll()

    def close(self) -> None:
        """Watch nothing any more."""
        self._poller.stop()

    def _note(self, span: Span) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """What was noted in the step that has ended."""
        taken, self._finished = self._finished, []
        return taken
