"""The state of a published model, which its ports share; `published_model` says how it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from offbeat.averaging.background.interface import Contribution
from offbeat.averaging.background.interval_choice import IntervalChoice
from offbeat.averaging.background.model_state import ModelState


@dataclass(kw_only=True, slots=True)
class AveragingCounts:
    """What became of the averages of a rank.

    Attributes:
        made: the versions of which it received at least one piece.
        missed: the versions that it contributed to, or arrived at, and of which it received none.
        stale: the contributions in its averages, its own included, that were not fresh.
        contributions: all contributions in its averages.
    """

    made: int = 0
    missed: int = 0
    stale: int = 0
    contributions: int = 0


@dataclass(slots=True)
class TrainerArrival:
    """The trainer has arrived at a version that is not closed."""

    version: int
    has_quorum: bool = False


class PublishedState:
    """What the three ports of a `PublishedModel` share. Only they read and change it.

    Args:
        model: the model, or the model and the gradients, that this rank averages.
        one_at_a_time: whether the rank takes part in one average at a time; else it arrives after
            every step, and contributes whenever a peer asks.
        max_credit: how many arrivals the rank skips at most for contributions on its behalf, >= 1.
        intervals: after how many steps the rank arrives; None: after each.
    """

    def __init__(
        self,
        model: ModelState,
        *,
        one_at_a_time: bool = True,
        max_credit: int = 20,
        intervals: IntervalChoice | None = None,
    ) -> None:
        self.model = model
        self.one_at_a_time = one_at_a_time
        self.max_credit = max_credit
        self.intervals = intervals or IntervalChoice.fixed(1)
        self.num_since = 0
        # One lock for everything: a port method is one transition, and callers wait on its
        # condition. It is re-entrant because transitions use each other.
        self.changed = threading.Condition(threading.RLock())
        self.counts = AveragingCounts()
        self.expelled = False
        self.error: Exception | None = None
        self.epoch = 0
        self.steps_behind = 0
        self.on_missing_model: Callable[[int], None] = lambda member: None
        self._reset()

    def _reset(self) -> None:
        """The state of a new generation."""
        self.quiescing = False
        self.open: set[int] = set()
        self.newest = -1
        self.invited: int | None = None
        self.arrival: TrainerArrival | None = None
        self.trainer_waits = False
        self.credit = 0
        self.awaited: int | None = None
        self.steps: dict[int, int] = {}
        self.held_by: Set[int] = frozenset()
        self.given_up: Set[int] = frozenset()
        self.dead: set[int] = set()
        self.averages_are_over = False
        self.received: dict[int, Contribution | None] = {}

    @property
    def is_available(self) -> bool:
        """Whether there is a model that peers may have."""
        return self.model.exists and not self.expelled

    @property
    def upcoming(self) -> int:
        """The version at which the trainer would arrive now."""
        return max(self.intervals.next_version(self.newest), self.invited or 0)

    @property
    def arrived_at(self) -> int | None:
        return None if self.arrival is None else self.arrival.version

    def begin_generation(self) -> None:
        self.epoch += 1
        self._reset()
        self.intervals.begin_generation()
        self.model.begin_generation()

    def adopt(self, model: Contribution) -> None:
        self.model.adopt(model)
        self.expelled = False
        self.changed.notify_all()

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error
