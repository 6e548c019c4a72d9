"""The model of a rank that three threads share, and where the rank stands.

One lock guards everything. A method is one transition, and belongs to one of three callers:

- **the trainer**, the thread that trains, publishes the model at the end of a step, arrives at
  versions, and takes what averages have made of the model;
- **the protocol**, the thread that averages, asks for contributions and hands over averages;
- **the membership** (`progress_thread`) leads the rank from one generation into the next.

The state has three components, which change independently.

**The model.**

    EMPTY      There is no model: the training has not begun, or a checkpoint was loaded.
    PUBLISHED  Peers may have the model.
    EXPELLED   This rank is not a member. Its trainer continues alone, with its own model.

    event                     from             to
    begin                     EMPTY            PUBLISHED, with the trainer's model
    forget                    PUBLISHED        EMPTY
    expel                     any              EXPELLED
    adopt                     any              PUBLISHED, with a member's model
    receive_model             EMPTY, EXPELLED  PUBLISHED, with a member's model
    continue_without_model    EXPELLED         PUBLISHED, with the rank's own model
    continue_without_model    EMPTY            failed
    fail                      any              failed

A rank may be EXPELLED without a model, too; `continue_without_model` then fails as from EMPTY.
After a failure, every later call of the trainer that could wait raises the error.

**The arrival of the trainer.**

    COMPUTING    The trainer has arrived at no version whose average is still to come.
    ARRIVED(v)   It has arrived at version v. Its contribution is fresh.
    QUORUM(v)    Enough ranks have arrived at v; the average depends on the network alone.

    event               from                   to
    arrive              COMPUTING              ARRIVED(v)
    quorum_arrived(v)   ARRIVED(v)             QUORUM(v)
    close_version(v)    ARRIVED(v), QUORUM(v)  COMPUTING
    begin_generation    any                    COMPUTING

`arrive` waits for COMPUTING, or returns without an arrival. `wait` waits for COMPUTING, or, where
the average may come later, for QUORUM.

**Each version.**

    event                 from      to
    contribute(v)         unknown   open: a contribution of this rank is under way
    close_version(v)      open      closed: the averages that came are merged
    merge_late(v)         closed    closed: an average that came late is merged
    finalize_version(v)   closed    final: nothing more will come
    begin_generation      any       unknown: versions are numbered anew

Besides, the protocol may *hold* the trainer: `wait_for_late` waits until the members that it names
have ended their steps. A rank whose step end is awaited like that knows so (`await_step`) and tells
its peers, also where it skips an arrival (`take_awaited`).

With `one_at_a_time` a rank has at most one open version, because two averages that both contain one
snapshot of its model would move the model twice. Then it also takes part in about one version for
each of its steps, which bounds its traffic: every contribution that was made on its behalf while it
was computing gives it a *credit*, and for each credit it skips one arrival. `quiesce` ends all this
before a generation changes: no version opens any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offbeat.averaging.background.interface import Contribution, Piece, VersionResult
from offbeat.averaging.background.merge_rules import MergeRule
from offbeat.codec.model_wire import Counters, Note, Values, no_counters
from offbeat.errors import PeerError


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


class Taken(NamedTuple):
    """With what the trainer continues.

    Attributes:
        values: of the model; read-only.
        counters: the model's.
        is_held: whether the trainer's model holds `values` already: no average has come since it
            ended its step.
    """

    values: Values
    counters: Counters
    is_held: bool


class SharedModel:
    """A rank's model, its integer buffers and its step, for the three threads that use it.

    Args:
        make_rule: makes the merge rule that holds a model, once there is one.
        one_at_a_time: whether the rank takes part in one average at a time; else it arrives after
            every step, and contributes whenever a peer asks.
        max_credit: how many arrivals the rank skips at most for contributions on its behalf, >= 1.
        interval: how many steps there are from one arrival to the next, >= 1.
        changed: on which callers wait; None: on one of the operating system's.

    Attributes:
        counts: what became of averages.
        step: how many steps the trainer has made, including those of the member whose model was
            adopted.
        steps_behind: how many steps this rank had made less than half of the ranks when it last
            heard of theirs; 0 for that half.
        held_by: the members that must end their steps before this rank begins another one.
        epoch: number of generations begun so far.
        on_missing_model: is called, outside the lock, with a member that may have been asked for
            its model and has none to give, or is dead.
    """

    def __init__(
        self,
        make_rule: Callable[[Values], MergeRule],
        *,
        one_at_a_time: bool = True,
        max_credit: int = 20,
        interval: int = 1,
        changed: threading.Condition | None = None,
    ) -> None:
        # Its lock may be taken again because transitions use each other.
        self._changed = changed or threading.Condition()
        self.counts = AveragingCounts()
        self.on_missing_model: Callable[[int], None] = lambda member: None
        self._make_rule = make_rule
        self._one_at_a_time, self._max_credit, self._interval = one_at_a_time, max_credit, interval
        self._rule: MergeRule | None = None
        self._counters = no_counters()
        self.step = self._num_since = self.epoch = self.steps_behind = 0
        self._replaced = self._expelled = self._is_final = self._rests = False
        self._error: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        """The state of a new generation."""
        self._quiescing = False
        self._open: set[int] = set()
        self._missed: set[int] = set()  # closed without an average, which may still arrive
        self._newest = -1
        self._invited: int | None = None
        self._arrival: int | None = None  # the version, until it is closed
        self._has_quorum = False
        self._trainer_waits = self._rests
        self._credit = 0
        self._awaited: int | None = None
        self._steps: dict[int, int] = {}
        self.held_by: Set[int] = frozenset()
        self._given_up: Set[int] = frozenset()
        self._dead: set[int] = set()
        self._averages_are_over = False
        self._received: dict[int, Contribution | None] = {}

    # The trainer

    @property
    def has_begun(self) -> bool:
        """Whether there is a model."""
        with self._changed:
            return self._rule is not None

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model: `model`, which belongs to this object."""
        with self._changed:
            self._rule, self._counters, self.step = self._make_rule(model), counters, step
            self._num_since = step % self._interval

    def forget(self) -> None:
        """There is no model any more, until `begin`."""
        with self._changed:
            self._rule = None

    def advance(
        self, model: Sequence[Values], counters: Counters, *, is_given: bool = False
    ) -> bool:
        """The trainer has ended a step.

        Args:
            model: what it holds, in vectors that have all elements side by side.
            counters: its integer buffers.
            is_given: whether `model` is known to be finite, and belongs to this object from now on;
                else it is read now and not kept.

        Returns:
            Whether the model is finite; if not, nothing has changed.
        """
        with self._changed:
            # A step that began with a model which was replaced meanwhile says nothing about the
            # new one.
            if not self._replaced:
                if not self._existing.advance(model, is_given=is_given):
                    return False
                self._counters = counters
            self._replaced = False
            self.step += 1
            self._num_since += 1
            return True

    def end_with(self, held: Values, counters: Counters) -> None:
        """The trainer takes no more steps, and its model holds `held` and `counters`. Where
        somebody has written into it since its last step, such as the best model, that is what it
        ends with, and averages change it no more.
        """
        with self._changed:
            if not (self._replaced or np.array_equal(held, self._existing.given)):
                self.begin(held, counters, step=self.step)
                self._is_final = True

    def take(self) -> Taken:
        """The trainer continues."""
        with self._changed:
            self._replaced = False
            values = self._existing.take()
            return Taken(values, self._counters, is_held=values is self._existing.held)

    def rebase(self, held: Values) -> None:
        """The trainer's model holds `held` instead of what it took."""
        with self._changed:
            self._existing.rebase(held)

    @property
    def is_due(self) -> bool:
        """Whether the trainer, which has ended a step, should arrive: after `interval` steps, or
        where a version waits for it.
        """
        with self._changed:
            return self._num_since >= self._interval or self._invited is not None

    @property
    def _upcoming(self) -> int:
        """The version at which the trainer would arrive now."""
        return max(self._newest + 1, self._invited or 0)

    @property
    def _is_free(self) -> bool:
        """Whether `arrive` need not wait for a contribution that is under way."""
        return self._arrival is None and not (self._one_at_a_time and self._open)

    @property
    def _skips_arrival(self) -> bool:
        skips = self._one_at_a_time and self._credit > 0 and self._invited is None
        return self._expelled or self._quiescing or skips

    def arrive(self, must_wait: Callable[[int], bool]) -> int | None:
        """Arrive at a version, unless this rank need not.

        While a contribution is under way this waits, but only for a version that `must_wait`: else
        the rank does without an arrival. After an arrival the protocol must be told of it.

        Returns:
            The version; None without an arrival.

        Raises:
            Exception: what the protocol has failed with.
        """
        with self._changed:
            self._num_since = 0
            self._wait_for(
                lambda: self._skips_arrival or self._is_free or not must_wait(self._upcoming)
            )
            if self._skips_arrival:
                self._credit = max(0, self._credit - 1)
                return None
            if not self._is_free:
                return None
            version = self._upcoming
            self._arrival, self._has_quorum, self._invited = version, False, None
            self._trainer_waits = must_wait(version)
            return version

    def rest(self) -> None:
        """The trainer computes no step until `resume`, so that its model is fresh at any
        version.
        """
        with self._changed:
            self._rests = self._trainer_waits = True

    def resume(self) -> None:
        """The trainer computes again."""
        with self._changed:
            self._rests = self._trainer_waits = False

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
        with self._changed:
            # Meanwhile this rank has ended its step, so that its model is fresh at any version.
            self._trainer_waits = True
            released = self._wait_for(
                lambda: self._expelled or self._quiescing or self.held_by <= self._given_up,
                timeout_s,
            )
            self._trainer_waits = False
            late = frozenset() if released else frozenset(self.held_by - self._given_up)
            self._given_up |= late
            return late

    def wait(self, *, for_average: bool = True) -> None:
        """Wait until the version at which the trainer arrived is closed, or the generation changes.

        Args:
            for_average: whether to wait for the average. If not, it suffices that enough ranks have
                arrived; the average comes while the next step is computed.

        Raises:
            Exception: what the protocol has failed with.
        """
        with self._changed:
            self._wait_for(lambda: self._arrival is None or (self._has_quorum and not for_average))
            self._trainer_waits = False

    def raise_failure(self) -> None:
        """Raise what the protocol has failed with, or the membership, if one has."""
        with self._changed:
            if self._error is not None:
                raise self._error

    # The protocol. Its calls do not block.

    def contribute(self, version: int) -> Contribution | None:
        """The contribution to `version`; None to stay out of it. Called once for each version. The
        values are copied into messages before this rank does anything else.

        The contribution is fresh when the trainer has arrived and waits, at this version or another
        one, whether or not the protocol has received the arrival yet.
        """
        with self._changed:
            self._newest = max(self._newest, version)
            if self._invited is not None and self._invited <= version:
                self._invited = None  # the version proceeds without this rank's arrival
            if not self.is_available or self._quiescing:
                return None
            has_arrived = self.is_arrived_at(version)
            waits_for_another = self._one_at_a_time and self._open and not has_arrived
            if waits_for_another and self._moves_model(version):
                return None
            # A trainer that waits has ended its step, so its model is fresh at any version.
            fresh = has_arrived or self._trainer_waits
            mine = self._contribution_to(version, fresh=fresh)
            if mine is not None:
                self._open.add(version)
            self._credit = min(self._credit + (not fresh), self._max_credit)
            return mine

    def invite(self, version: int) -> None:
        """`version` has begun and waits for arrivals: the rank should arrive there, or at a later
        version, at the end of its next step, even if it is late.
        """
        with self._changed:
            self._invited = max(version, self._invited or 0)

    def quorum_arrived(self, version: int) -> None:
        """Enough ranks have arrived at `version`, so its average now depends on the network alone.
        Called at most once, and not after `close_version`.
        """
        with self._changed:
            if self.is_arrived_at(version):
                self._has_quorum = True
                self._changed.notify_all()

    def await_step(self, version: int) -> bool:
        """Peers may come to wait for the end of this rank's step: it contributed to `version`
        before it arrived. The protocol must be told when the step has ended, by an arrival at
        `version` or a later one.

        Returns:
            Whether the rank computes a step; False where it has ended one, and waits.
        """
        with self._changed:
            computes = not self._trainer_waits
            self._awaited = version if computes else None
            return computes

    def hold(self, late: Set[int]) -> None:
        """From now on the rank must begin no step before the ranks `late` have ended theirs; none:
        it need not wait for any. Called when this changes.
        """
        with self._changed:
            self.held_by = late
            self._given_up &= late
            self._changed.notify_all()

    def close_version(self, result: VersionResult) -> None:
        """The version is closed."""
        with self._changed:
            self._merge(result.version, result.pieces)
            members = result.members
            if result.pieces:
                self._count(members.values())
            else:
                self.counts.missed += 1
                self._missed.add(result.version)
            self._steps |= {rank: note.step for rank, note in members.items()}
            if self._steps:
                # Until there is news, peers go on as this rank does.
                half = sorted(self._steps.values())[len(self._steps) // 2]
                self.steps_behind = max(0, half - self.step)
            self._open.discard(result.version)
            if self.is_arrived_at(result.version):
                self._arrival = None
            self._changed.notify_all()

    def merge_late(self, version: int, piece: Piece) -> None:
        """A piece of a closed version has arrived after all. It must be merged, because peers have
        merged it, and without it the mean over ranks would change.
        """
        with self._changed:
            self._merge(version, (piece,))
            if version in self._missed:
                self._missed.remove(version)
                self.counts.missed -= 1
                self._count([note for note in piece.notes if note.weight])

    def finalize_version(self, version: int) -> None:
        """No further piece of this closed version will arrive: what is missing of its average does
        not exist for this rank.
        """
        with self._changed:
            self._missed.discard(version)
            self._finalize(version)
            self._changed.notify_all()

    def snapshot(self) -> Contribution | None:
        """The current model, for a member that requested it; None while there is no model. The
        values are copied into a message before this rank does anything else.
        """
        with self._changed:
            return self.own_model() if self.is_available else None

    def receive_model(self, sender: int, model: Contribution | None) -> None:
        """Member `sender` has answered a request for its model, with read-only values or, if it has
        no model, with None.
        """
        with self._changed:
            if self.is_available:  # it was asked for a mean of all models
                self._received[sender] = model
                self._changed.notify_all()
                return
            if model is not None:  # it was asked for by a rank that has none
                self.adopt(model)
                return
        # Outside the lock: the callback asks the next member, and posts to the protocol.
        self.on_missing_model(sender)

    def mark_dead(self, rank: int) -> None:
        """The driver says that member `rank` is dead or has left: nothing more arrives from it.
        Called once for each.
        """
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()
        self.on_missing_model(rank)

    def mark_final(self) -> None:
        """No living member takes a step any more, and every average that this rank contributed to
        has arrived. Its model changes no more, unless by a version of a member that it takes for
        dead. Called once.
        """
        with self._changed:
            self._averages_are_over = True
            self._changed.notify_all()

    # The membership, in the trainer's thread or its own. Generations are counted here in epochs: a
    # call that waits for members is told the epoch in which it began, and ends when that is over.

    @property
    def is_available(self) -> bool:
        """Whether there is a model that peers may have."""
        with self._changed:
            return self._rule is not None and not self._expelled

    def begin_generation(self) -> None:
        """A new generation begins: no version is open, and every caller that waits continues."""
        with self._changed:
            self.epoch += 1
            self._reset()
            self._changed.notify_all()

    def quiesce(self, timeout_s: float) -> None:
        """Open no versions any more, and wait for those that are open.

        A rank that left in the middle of an average would have contributed to models of peers that
        it never receives.
        """
        with self._changed:
            self._quiescing = True
            self._changed.wait_for(lambda: not (self._open or self._is_under_way), timeout_s)

    def expel(self) -> None:
        """This rank is not a member any more. Its trainer continues alone, and peers do not get its
        model, until `adopt`.
        """
        with self._changed:
            self._expelled = True
            self._changed.notify_all()

    def adopt(self, model: Contribution) -> None:
        """Replace this rank's model, and what the trainer does until it takes the next one, by the
        model of a member.
        """
        with self._changed:
            self._replaced = self._rule is not None
            self._rule, self._counters = self._make_rule(model.values.copy()), model.counters
            self.step = self.step if self._replaced else model.step
            self._expelled = False
            self._changed.notify_all()

    def continue_without_model(self, error: PeerError) -> None:
        """No member has a model to give: continue with this rank's own, or fail if it has none."""
        with self._changed:
            self._expelled = False
            if self._rule is None:
                self._error = error
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The protocol has ended with `error`, which the trainer's next call raises."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def is_arrived_at(self, version: int) -> bool:
        """Whether the trainer has arrived at `version`, and the version is not closed."""
        with self._changed:
            return self._arrival == version

    def take_awaited(self) -> int | None:
        """The version after which peers await the end of this rank's step; None if they do not.
        The step has ended, and the protocol must be told so.
        """
        with self._changed:
            awaited, self._awaited = self._awaited, None
            return awaited

    def own_model(self) -> Contribution:
        """This rank's current model, whether or not peers may have it."""
        with self._changed:
            return self._contribution(self._existing.snapshot, fresh=False)

    def dead(self) -> frozenset[int]:
        """The members that are dead or have left."""
        with self._changed:
            return frozenset(self._dead)

    def wait_until_begun(self, timeout_s: float) -> bool:
        """Wait until there is a model. Returns whether there is one."""
        with self._changed:
            return self._wait_for(lambda: self._rule is not None, timeout_s)

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until something changes here, for `timeout_s` at most."""
        with self._changed:
            self.raise_failure()
            self._changed.wait(timeout_s)

    def forget_received(self) -> None:
        """Drop models that came after the one who asked for them had stopped waiting."""
        with self._changed:
            self._received = {}

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
        with self._changed:
            same = self._wait_in(
                epoch, lambda: members - self._dead <= self._received.keys(), timeout_s
            )
            received, self._received = self._received, {}
            if not same:
                return None
            return {
                rank: model for rank in sorted(members) if (model := received.get(rank)) is not None
            }

    def wait_until_final(self, epoch: int) -> bool:
        """Wait until no member that lives takes a step any more and all averages have arrived here.
        Returns False when the generation has changed.
        """
        with self._changed:
            return self._wait_in(epoch, lambda: self._averages_are_over)

    def _wait_in(
        self, epoch: int, until: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        self._wait_for(lambda: until() or self.epoch != epoch, timeout_s)
        return self.epoch == epoch

    def _wait_for(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Returns whether it is so. Raises what the protocol has failed with."""
        is_so = self._changed.wait_for(lambda: self._error is not None or until(), timeout_s)
        self.raise_failure()
        return is_so

    # What versions average. A subclass whose versions average something else overrides these, which
    # are called under the lock.

    @property
    def _is_under_way(self) -> bool:
        """Whether something that this rank has contributed may still come back, besides averages
        of open versions.
        """
        return False

    def _moves_model(self, version: int) -> bool:
        """Whether `version` averages models."""
        return True

    def _contribution_to(self, version: int, *, fresh: bool) -> Contribution | None:
        """What this rank contributes to `version`; None if it has nothing to contribute."""
        return self._contribution(self._existing.current, fresh=fresh)

    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        """Merge averages of `version`."""
        # Counters stay this rank's own. A rank that took over a larger count and went on from there
        # would count more steps than any rank has made.
        if self._rule is not None and not self._is_final:
            self._rule.merge(pieces)

    def _finalize(self, version: int) -> None:
        """No further piece of `version` will come."""

    def _count(self, members: Collection[Note]) -> None:
        """An average of `members` has arrived."""
        self.counts.made += 1
        self.counts.contributions += len(members)
        self.counts.stale += sum(not note.fresh for note in members)

    def _contribution(self, values: Values, *, fresh: bool) -> Contribution:
        return Contribution(
            values=values,
            step=self.step,
            fresh=fresh,
            counters=self._counters,
            anchor=self._existing.anchor,
        )

    @property
    def _existing(self) -> MergeRule:
        assert self._rule is not None, "begin must be called first"
        return self._rule
