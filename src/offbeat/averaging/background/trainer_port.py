"""What the thread that trains may do with its rank's published model."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from offbeat.averaging.background.model_state import Taken
from offbeat.averaging.background.published_state import (
    AveragingCounts,
    PublishedState,
    TrainerArrival,
)
from offbeat.codec.model_wire import Counters, Values


class TrainerPort:
    """Publishes the model at the end of a step, arrives at versions, and takes what averages have
    made of the model.
    """

    def __init__(self, state: PublishedState) -> None:
        self._state = state

    @property
    def counts(self) -> AveragingCounts:
        return self._state.counts

    @property
    def step(self) -> int:
        """How many steps the trainer has made, including those of the member whose model was
        adopted.
        """
        with self._state.changed:
            return self._state.model.step

    @property
    def steps_behind(self) -> int:
        """How many steps this rank had made less than half of the ranks when it last heard of
        theirs; 0 for that half.
        """
        with self._state.changed:
            return self._state.steps_behind

    @property
    def is_final(self) -> bool:
        """Whether the trainer's steps count no more; see `ModelState.end_training`."""
        with self._state.changed:
            return self._state.model.is_final

    @property
    def has_begun(self) -> bool:
        """Whether there is a model."""
        with self._state.changed:
            return self._state.model.exists

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model: `model`, which belongs to this object."""
        with self._state.changed:
            self._state.model.begin(model, counters, step=step)
            self._state.num_since = step % self._state.intervals.interval

    def forget(self) -> None:
        """There is no model any more, until `begin`."""
        with self._state.changed:
            self._state.model.forget()

    def advance(self, model: Sequence[Values], counters: Counters) -> bool:
        """The trainer has ended a step.

        Args:
            model: what it holds, in vectors that have all elements side by side. They are read now
                and not kept.
            counters: its integer buffers.

        Returns:
            Whether the model is finite; if not, nothing has changed.
        """
        with self._state.changed:
            is_finite = self._state.model.advance(model, counters)
            self._state.num_since += is_finite
            return is_finite

    def take(self) -> Taken:
        """The trainer continues."""
        with self._state.changed:
            return self._state.model.take()

    def rebase(self, held: Values) -> None:
        """The trainer's model holds `held` instead of what it took."""
        with self._state.changed:
            self._state.model.rebase(held)

    @property
    def interval(self) -> int:
        """How many steps there are from one arrival to the next."""
        with self._state.changed:
            return self._state.intervals.interval

    def wish(self, interval: int) -> None:
        """This rank would have `interval`. All ranks together choose."""
        with self._state.changed:
            self._state.intervals.wish = interval

    @property
    def upcoming(self) -> int:
        """The version at which the trainer would arrive now."""
        with self._state.changed:
            return self._state.upcoming

    @property
    def is_due(self) -> bool:
        """Whether the trainer, which has ended a step, should arrive: after `interval` steps, or
        where a version waits for it.
        """
        state = self._state
        with state.changed:
            return state.num_since >= state.intervals.interval or state.invited is not None

    def arrive(self, must_wait: Callable[[int], bool]) -> int | None:
        """Arrive at a version, unless this rank need not.

        While a contribution is under way this waits, but only for a version that `must_wait`: else
        the rank does without an arrival. After an arrival the protocol must be told of it.

        Returns:
            The version; None without an arrival.

        Raises:
            Exception: what the protocol has failed with.
        """
        state = self._state
        with state.changed:
            state.num_since = 0
            while True:
                state.raise_failure()
                skips = state.one_at_a_time and state.credit > 0 and state.invited is None
                if state.expelled or state.quiescing or skips:
                    state.credit = max(0, state.credit - 1)
                    return None
                version = state.upcoming
                if state.arrival is None and not (state.one_at_a_time and state.open):
                    break
                if not must_wait(version):
                    return None
                state.changed.wait()
            state.arrival, state.invited = TrainerArrival(version), None
            state.trainer_waits = must_wait(version)
            return version

    @property
    def held_by(self) -> Set[int]:
        """The members that must end their steps before this rank begins another one."""
        with self._state.changed:
            return self._state.held_by

    def rest(self) -> None:
        """The trainer computes no step until `resume`, so that its model is fresh at any
        version.
        """
        with self._state.changed:
            self._state.trainer_waits = True

    def resume(self) -> None:
        """The trainer computes again."""
        with self._state.changed:
            self._state.trainer_waits = False

    def wait_for_late(self, timeout_s: float) -> Set[int]:
        """Wait until this rank may begin another step.

        Args:
            timeout_s: how long to wait at most, in seconds. Members that are late for longer are
                not waited for any more until they have ended a step.

        Returns:
            The members that were waited for in vain.

        Raises:
            Exception: what the protocol has failed with.
        """
        state = self._state

        def may_go_on() -> bool:
            ended = state.error is not None or state.expelled or state.quiescing
            return ended or not state.held_by - state.given_up

        with state.changed:
            # Meanwhile this rank has ended its step, so that its model is fresh at any version.
            state.trainer_waits = True
            released = state.changed.wait_for(may_go_on, timeout_s)
            state.trainer_waits = False
            state.raise_failure()
            late = frozenset() if released else frozenset(state.held_by - state.given_up)
            state.given_up |= late
            return late

    def raise_failure(self) -> None:
        """Raise what the protocol has failed with, or the membership, if one has."""
        with self._state.changed:
            self._state.raise_failure()

    def wait(self, *, for_average: bool = True) -> None:
        """Wait until the version at which the trainer arrived is closed, or the generation changes.

        Args:
            for_average: whether to wait for the average. If not, it suffices that enough ranks have
                arrived; the average comes while the next step is computed.

        Raises:
            Exception: what the protocol has failed with.
        """
        state = self._state

        def is_over() -> bool:
            return (
                state.arrival is None
                or state.error is not None
                or (state.arrival.has_quorum and not for_average)
            )

        with state.changed:
            state.changed.wait_for(is_over)
            state.trainer_waits = False
            state.raise_failure()
