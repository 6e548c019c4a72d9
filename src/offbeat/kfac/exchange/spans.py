"""What a part does within a step and when, noted in few steps: in all of them it would cost time,
and fill the record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from offbeat.transport.driver import Pending
from offbeat.transport.lookout import Lookout

MAX_SPANS: Final = 4096
"""Of one step; what comes later is not noted."""


class Span(NamedTuple):
    """One thing that was done.

    Attributes:
        kind: what sort of thing.
        what: which one.
        began_s, ended_s: on the monotonic clock.
    """

    kind: str
    what: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """A factor's place in the plan.

    Attributes:
        factor: its name, such as ``A of 'conv1'``.
        rows: of each of its matrices.
        matrices: how many there are: the groups of a convolution. 0: a diagonal.
        message: number of the message that sums it over ranks; None where it stays with its owner.
        owner: who inverts it; None: every rank.
        sends: what the owner sends: "inverses" or "directions"; None where every rank inverts.
        predicted_s: how long that was expected to take; None where nothing was measured.
    """

    factor: str
    rows: int
    matrices: int
    message: int | None
    owner: int | None
    sends: str | None
    predicted_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One step, looked at closely.

    Attributes:
        spans: what was done in it, in order of ends.
        duties: the plan, if it is new.
    """

    spans: Sequence[Span]
    duties: Sequence[Duty] = ()


class Spans:
    """Notes what is done, in steps that were chosen for it."""

    def __init__(self) -> None:
        self.on = False
        """Whether this step is looked at."""
        self._spans: list[Span] = []
        self._finished: list[Span] = []
        self._lookout = Lookout()

    def begin(self, *, on: bool, keep: bool = True) -> None:
        """A step begins, to be looked at or not. What was noted in the one before is kept, or not,
        for `take`.
        """
        self._lookout.stop()
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
        """Messages that belong together have been begun. They are under way until they are seen to
        be over.
        """
        if self.on:
            self._lookout.watch(
                pending, lambda over_s: self._note(Span(kind, what, began_s, over_s))
            )

    def arrived(self) -> None:
        """This rank has waited for some of what was launched."""
        self._lookout.look()

    def close(self) -> None:
        """Watch nothing any more."""
        self._lookout.stop()

    def _note(self, span: Span) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """What was noted in the step that has ended."""
        taken, self._finished = self._finished, []
        return taken


def is_round(number: int, digits: int) -> bool:
    """Whether `number` has at most so many binary digits before its zeros: of n numbers that is
    about 2^(digits-1) log2 n.

    >>> [number for number in range(40) if is_round(number, 2)]
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    return (
        number >> max(number.bit_length() - digits, 0) << max(number.bit_length() - digits, 0)
        == number
    )
