"""Between the thread that trains and the thread that answers: one rank's model, and where the rank
stands.

    the trainer, at the end of a step: advance(model); arrive() -> a version to go to, or none;
    wait(); take()
    the protocol, at any time:         contribute, invite, gathered, close, amend; snapshot,
    receive; bury, rested

Usually a rank takes part in one average at a time and one a step (`by_turns`): for each time that
it was answered for it does without an arrival, so that traffic is bounded by steps, and while a
contribution of it is under way it stays out of other versions, since two averages of the same model
would move it twice as far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.averaging.background.group_base import Contribution, Outcome, Piece
from offbeat.averaging.background.merge_rules import Iterate
from offbeat.codec.model_wire import Values
from offbeat.errors import PeerError

Counters = NDArray[np.int64]
"""A model's integer buffers, side by side, shape (any,)."""


@dataclass(kw_only=True, slots=True)
class Averages:
    """What became of a rank's averages, in counts.

    Attributes:
        made: versions from which it had at least a piece.
        missed: versions that it contributed to, or arrived at, and had nothing from.
        stale: contributions of members, its own included, that were not fresh.
        contributions: contributions of members in all.
    """

    made: int = 0
    missed: int = 0
    stale: int = 0
    contributions: int = 0


class Replica:
    """A rank's model as its protocol sees it. All methods may be called from any thread.

    Args:
        weight: of this rank in averages, > 0.
        make_iterate: makes the iterate of a model, once there is one.
        by_turns: whether it takes part in one average at a time; else it arrives after every step
            and answers at any time.
        max_credit: for how many answers at most it later does without an arrival, >= 1.

    Attributes:
        averages: counts.
        look_for_model: called when a member that may have been asked for its model has none to
            give, or is dead.
    """

    def __init__(
        self,
        *,
        weight: float,
        make_iterate: Callable[[Values], Iterate],
        by_turns: bool = True,
        max_credit: int = 20,
    ) -> None:
        self.averages = Averages()
        self._weight = weight
        self._by_turns = by_turns
        self.look_for_model: Callable[[int], None] = lambda member: None
        self._max_credit = max_credit
        self._make_iterate = make_iterate
        self._changed = threading.Condition(threading.RLock())
        self._iterate: Iterate | None = None
        self._counters: Counters = np.empty(0, np.int64)
        self._step = 0
        self._error: Exception | None = None
        self._states: dict[int, Contribution | None] = {}
        self._absent = False
        self._replaced = False
        self._epoch = 0
        self._restart()

    def _restart(self) -> None:
        self._settling_down = False
        self._open: set[int] = set()
        self._newest = -1
        self._invited: int | None = None
        self._arrived: int | None = None
        self._gathered = False
        self._credit = 0
        self._waits = False
        self._dead: set[int] = set()
        self._resting: set[int] = set()
        self._states.clear()

    # The trainer's side

    @property
    def step(self) -> int:
        """How many steps the trainer has come to the end of, those of the member included whose
        model was taken over.
        """
        with self._changed:
            return self._step

    @property
    def ready(self) -> bool:
        """Whether there is a model to answer with."""
        with self._changed:
            return self._iterate is not None

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model: `model`, which belongs to the replica."""
        with self._changed:
            self._iterate, self._counters, self._step = self._make_iterate(model), counters, step

    def forget(self) -> None:
        """There is no model any more, until `begin`."""
        with self._changed:
            self._iterate = None

    def advance(self, model: Values, counters: Counters) -> None:
        """The trainer has come to the end of a step. `model` belongs to the replica from now on."""
        with self._changed:
            if not self._replaced:
                self._present().advance(model)
                self._counters = np.maximum(self._counters, counters)
            self._replaced = False
            self._step += 1

    def take(self) -> tuple[Values, Counters]:
        """What the trainer goes on from, not to be changed."""
        with self._changed:
            self._replaced = False
            return self._present().take(), self._counters

    def hold(self, held: Values) -> None:
        """The trainer's model holds `held` in the place of what it took."""
        with self._changed:
            self._present().hold(held)

    def arrive(self, must_wait: Callable[[int], bool]) -> int | None:
        """Where the trainer should arrive now; None when it need not.

        Waits while contributions are under way, but only for a version that `must_wait`: else the
        rank does without one.
        Afterwards the trainer has arrived there, and the protocol has to be told.
        """
        with self._changed:
            while True:
                self._check()
                if (
                    self._absent
                    or self._settling_down
                    or (self._by_turns and self._credit and self._invited is None)
                ):
                    self._credit = max(0, self._credit - 1)
                    return None
                version = max(self._newest + 1, self._invited or 0)
                if self._arrived is None and not (self._by_turns and self._open):
                    break
                if not must_wait(version):
                    return None
                self._changed.wait()
            self._arrived, self._invited, self._gathered = version, None, False
            self._waits = must_wait(version)
            return version

    def wait(self, *, for_average: bool = True) -> None:
        """Return when the version that the trainer arrived at is over, or the membership has
        changed.

        Without `for_average` it is enough that no arrivals are waited for any more; the average
        comes beside the next step.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._arrived is None
                    or self._error is not None
                    or (self._gathered and not for_average)
                )
            )
            self._waits = False
            self._check()

    @property
    def has_model(self) -> bool:
        """Whether there is a model that the others may have."""
        with self._changed:
            return self._iterate is not None and not self._absent

    def do_without_theirs(self, error: PeerError) -> None:
        """No member has a model to give: go on with this rank's own, or fail if it has none."""
        with self._changed:
            self._absent = False
            self._error = error if self._iterate is None else self._error
            self._changed.notify_all()

    @property
    def epoch(self) -> int:
        """Number of the membership, counted here."""
        with self._changed:
            return self._epoch

    def is_arrived_at(self, version: int) -> bool:
        """Whether the trainer's arrival at `version` still counts."""
        with self._changed:
            return self._arrived == version

    def own(self) -> Contribution:
        """This rank's model as it is, whether or not the others may have it."""
        with self._changed:
            return self._contribution(self._present().shown, fresh=False)

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until there is a model. Returns whether there is."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._iterate is not None or self._error is not None, timeout_s
            )
            self._check()
            return self._iterate is not None

    def states(
        self, of: frozenset[int], epoch: int, *, patience_s: float
    ) -> dict[int, Contribution] | None:
        """The models that members `of` have sent; waits for those that live. None: the membership
        has changed meanwhile.

        Args:
            of: positions of members.
            epoch: of the membership in which they were asked.
            patience_s: after how long those that hang are left out.
        """
        with self._changed:
            same = self._wait_in(epoch, lambda: of - self._dead <= self._states.keys(), patience_s)
            states, self._states = self._states, {}
            return (
                {rank: state for rank in sorted(of) if (state := states.get(rank)) is not None}
                if same
                else None
            )

    def wait_for_rest(self, members: frozenset[int], epoch: int) -> bool:
        """Wait until those of `members` that live take no more steps. False: the membership has
        changed meanwhile.
        """
        with self._changed:
            return self._wait_in(epoch, lambda: members <= self._dead | self._resting)

    def dead(self) -> frozenset[int]:
        """Members that are dead or have left."""
        with self._changed:
            return frozenset(self._dead)

    def _wait_in(
        self, epoch: int, until: Callable[[], bool], patience_s: float | None = None
    ) -> bool:
        self._changed.wait_for(
            lambda: until() or self._error is not None or self._epoch != epoch, patience_s
        )
        self._check()
        return self._epoch == epoch

    # The engine's side

    def restart(self) -> None:
        """A new membership begins: nothing is under way, and whoever waits goes on."""
        with self._changed:
            self._epoch += 1
            self._restart()
            self._changed.notify_all()

    def settle_down(self, timeout_s: float) -> None:
        """Stay out of new versions, and wait for what is under way: for who takes part, half an
        average is worse than none.
        """
        with self._changed:
            self._settling_down = True
            self._changed.wait_for(lambda: not self._is_under_way(), timeout_s)

    def leave(self) -> None:
        """This rank is no member any more. Its trainer goes on alone, and nobody is given its
        model, until `adopt`.
        """
        with self._changed:
            self._absent = True
            self._changed.notify_all()

    def adopt(self, state: Contribution) -> None:
        """Take a member's model in the place of this rank's, with whatever the trainer did since it
        last took one.
        """
        with self._changed:
            self._replaced = self._iterate is not None
            self._iterate, self._counters = self._make_iterate(state.values.copy()), state.counters
            self._step = self._step if self._replaced else state.step
            self._absent = False
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The protocol has ended in `error`, which the trainer's next call raises."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # The protocol's side

    def contribute(self, version: int) -> Contribution | None:
        with self._changed:
            self._newest = max(self._newest, version)
            if self._invited is not None and self._invited <= version:
                self._invited = None  # it goes on without this rank's arrival
            if self._iterate is None or self._absent or self._settling_down:
                return None
            mine = self._offer(
                version, self._iterate, fresh=version == self._arrived or self._waits
            )
            if mine is not None:
                self._open.add(version)
                self._was_answered_for(not mine.fresh)
            return mine

    def _was_answered_for(self, was: bool) -> None:
        self._credit = min(self._credit + was, self._max_credit)

    def invite(self, version: int) -> None:
        with self._changed:
            self._invited = max(version, self._invited or 0)

    def gathered(self, version: int) -> None:
        with self._changed:
            if version == self._arrived:
                self._gathered = True
                self._changed.notify_all()

    def close(self, outcome: Outcome) -> None:
        with self._changed:
            self._merge(outcome.version, outcome.pieces)
            self._count(outcome)
            self._open.discard(outcome.version)
            if outcome.version == self._arrived:
                self._arrived = None
            self._changed.notify_all()

    def amend(self, version: int, piece: Piece) -> None:
        with self._changed:
            self._merge(version, (piece,))

    def settle(self, version: int) -> None:
        """What has come of `version` is merged; there is nothing else."""

    def snapshot(self) -> Contribution | None:
        with self._changed:
            return (
                None
                if self._iterate is None or self._absent
                else self._contribution(self._iterate.shown, fresh=False)
            )

    def receive(self, sender: int, state: Contribution | None) -> None:
        with self._changed:
            if self._iterate is not None and not self._absent:
                self._states[sender] = state
                self._changed.notify_all()
                return
        if state is None:
            self.look_for_model(sender)
        else:
            self.adopt(state)

    def bury(self, rank: int) -> None:
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()
        self.look_for_model(rank)

    def rested(self, rank: int) -> None:
        with self._changed:
            self._resting.add(rank)
            self._changed.notify_all()

    def _offer(self, version: int, iterate: Iterate, *, fresh: bool) -> Contribution | None:
        """What to contribute to `version`."""
        if self._by_turns and self._open and version != self._arrived:
            return None
        return self._contribution(iterate.shown, fresh=fresh)

    def _contribution(self, values: Values, *, fresh: bool) -> Contribution:
        return Contribution(
            values=values,
            step=self._step,
            fresh=fresh,
            weight=self._weight,
            counters=self._counters,
        )

    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        if self._iterate is None:
            return
        self._iterate.merge(pieces)
        for piece in pieces:
            self._counters = np.maximum(self._counters, piece.counters)

    def _is_under_way(self) -> bool:
        return bool(self._open)

    def _count(self, outcome: Outcome) -> None:
        notes = outcome.members.values()
        self.averages.made += bool(outcome.pieces)
        self.averages.missed += not outcome.pieces
        self.averages.contributions += len(notes)
        self.averages.stale += sum(not note.fresh for note in notes)

    def _present(self) -> Iterate:
        assert self._iterate is not None, "begin comes first"
        return self._iterate

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
