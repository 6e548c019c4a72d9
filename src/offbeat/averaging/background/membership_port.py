"""What the owner of the progress thread may do with its rank's published model."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.averaging.background.interface import Contribution
from offbeat.averaging.background.published_state import PublishedState
from offbeat.errors import PeerError


class MembershipPort:
    """Runs the protocol through the generations, in the trainer's thread or the membership's.

    Generations are counted here in epochs. A call that waits for members is told the epoch in which
    it began, and ends when that is over.
    """

    def __init__(self, state: PublishedState) -> None:
        self._state = state

    @property
    def epoch(self) -> int:
        with self._state.changed:
            return self._state.epoch

    @property
    def is_available(self) -> bool:
        """Whether there is a model that peers may have."""
        with self._state.changed:
            return self._state.is_available

    def begin_generation(self) -> None:
        """A new generation begins: no version is open, and every caller that waits continues."""
        with self._state.changed:
            self._state.begin_generation()
            self._state.changed.notify_all()

    def quiesce(self, timeout_s: float) -> None:
        """Open no versions any more, and wait for those that are open.

        A rank that left in the middle of an average would have contributed to models of peers that
        it never receives.
        """
        state = self._state
        with state.changed:
            state.quiescing = True
            state.changed.wait_for(lambda: not (state.open or state.model.is_under_way), timeout_s)

    def expel(self) -> None:
        """This rank is not a member any more. Its trainer continues alone, and peers do not get its
        model, until `adopt`.
        """
        with self._state.changed:
            self._state.expelled = True
            self._state.changed.notify_all()

    def adopt(self, model: Contribution) -> None:
        """Replace this rank's model, and what the trainer does until it takes the next one, by the
        model of a member.
        """
        with self._state.changed:
            self._state.adopt(model)

    def continue_without_model(self, error: PeerError) -> None:
        """No member has a model to give: continue with this rank's own, or fail if it has none."""
        state = self._state
        with state.changed:
            state.expelled = False
            if not state.model.exists:
                state.error = error
            state.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The protocol has ended with `error`, which the trainer's next call raises."""
        with self._state.changed:
            self._state.error = error
            self._state.changed.notify_all()

    def on_missing_model(self, callback: Callable[[int], None]) -> None:
        """Call `callback(member)` when a member that may have been asked for its model has none to
        give, or is dead.
        """
        self._state.on_missing_model = callback

    def is_arrived_at(self, version: int) -> bool:
        """Whether the trainer has arrived at `version`, and the version is not closed."""
        with self._state.changed:
            return self._state.arrived_at == version

    def take_awaited(self) -> int | None:
        """The version after which peers await the end of this rank's step; None if they do not.
        The step has ended, and the protocol must be told so.
        """
        with self._state.changed:
            awaited, self._state.awaited = self._state.awaited, None
            return awaited

    def own_model(self) -> Contribution:
        """This rank's current model, whether or not peers may have it."""
        with self._state.changed:
            return self._state.model.snapshot()

    def dead(self) -> frozenset[int]:
        """The members that are dead or have left."""
        with self._state.changed:
            return frozenset(self._state.dead)

    def wait_until_begun(self, timeout_s: float) -> bool:
        """Wait until there is a model. Returns whether there is one."""
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.model.exists or state.error is not None, timeout_s)
            state.raise_failure()
            return state.model.exists

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until something changes here, for `timeout_s` at most."""
        with self._state.changed:
            self._state.raise_failure()
            self._state.changed.wait(timeout_s)

    def forget_received(self) -> None:
        """Drop models that came after the one who asked for them had stopped waiting."""
        with self._state.changed:
            self._state.received = {}

    def collect_models(
        self, members: frozenset[int], epoch: int, *, timeout_s: float
    ) -> dict[int, Contribution] | None:
        """The models that `members` have sent.

        Args:
            members: the positions of members that were asked.
            epoch: in which they were asked.
            timeout_s: how long to wait for members that live, in seconds, >= 0.

        Returns:
            The models that came, by position; None when the generation has changed.
        """
        state = self._state
        with state.changed:
            same = self._wait_in(
                epoch, lambda: members - state.dead <= state.received.keys(), timeout_s
            )
            received, state.received = state.received, {}
            if not same:
                return None
            return {
                rank: model for rank in sorted(members) if (model := received.get(rank)) is not None
            }

    def wait_until_final(self, epoch: int) -> bool:
        """Wait until no member that lives takes a step any more and all averages have arrived here.
        Returns False when the generation has changed.
        """
        state = self._state
        with state.changed:
            return self._wait_in(epoch, lambda: state.averages_are_over)

    def _wait_in(
        self, epoch: int, until: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        state = self._state
        state.changed.wait_for(
            lambda: until() or state.error is not None or state.epoch != epoch, timeout_s
        )
        state.raise_failure()
        return state.epoch == epoch
