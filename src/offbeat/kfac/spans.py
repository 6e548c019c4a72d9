"""Notes what K-FAC does within a step and when. It does so in few steps: in all of them it would
cost time, and fill the record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from offbeat.callbacks.profile import Span
from offbeat.transport.completion_poller import CompletionPoller
from offbeat.transport.driver import Pending

MAX_SPANS: Final = 4096
"""Of one step; what comes later is not noted."""


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
