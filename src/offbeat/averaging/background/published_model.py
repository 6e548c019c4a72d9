"""The published model of a rank: the model that peers may have, and where the rank stands.

Three callers share this state, each in a thread of its own. Each of them has a port with the
operations that it may use, and gets no other one:

- `TrainerPort`: the thread that trains. It publishes the model at the end of a step, arrives at
  versions, and takes what averages have made of the model.
- `ProtocolPort` (in `interface`): the thread that runs the averaging protocol. It asks for
  contributions and snapshots, and hands over averages.
- `MembershipPort`: what runs the protocol through the generations (`progress_thread`).

The state has three components, which change independently.

**The model.**

    EMPTY      There is no model: the training has not begun, or a checkpoint was loaded.
    PUBLISHED  Peers may have the model.
    EXPELLED   This rank is not a member. Its trainer continues alone, with its own model.

    event                              from             to
    trainer.begin                      EMPTY            PUBLISHED, with the trainer's model
    trainer.forget                     PUBLISHED        EMPTY
    membership.expel                   any              EXPELLED
    membership.adopt                   any              PUBLISHED, with a member's model
    protocol.receive_model             EMPTY, EXPELLED  PUBLISHED, with a member's model
    membership.continue_without_model  EXPELLED         PUBLISHED, with the rank's own model
    membership.continue_without_model  EMPTY            failed
    membership.fail                    any              failed

A rank may be EXPELLED without a model, too; `continue_without_model` then fails as from EMPTY.
After a failure, every later call of the trainer that could wait raises the error.

**The arrival of the trainer.**

    COMPUTING    The trainer has arrived at no version whose average is still to come.
    ARRIVED(v)   It has arrived at version v. Its contribution is fresh.
    QUORUM(v)    Enough ranks have arrived at v; the average depends on the network alone.

    event                         from                   to
    trainer.arrive                COMPUTING              ARRIVED(v)
    protocol.quorum_arrived(v)    ARRIVED(v)             QUORUM(v)
    protocol.close(v)             ARRIVED(v), QUORUM(v)  COMPUTING
    membership.begin_generation   any                    COMPUTING

`trainer.arrive` waits for COMPUTING, or returns without an arrival. `trainer.wait` waits for
COMPUTING, or, where the average may come later, for QUORUM.

**Each version.**

    event                           from      to
    protocol.contribute(v)          unknown   open: a contribution of this rank is under way
    protocol.close(v)               open      closed: the averages that came are merged
    protocol.merge_late(v)          closed    closed: an average that came late is merged
    protocol.finalize_version(v)    closed    final: nothing more will come
    membership.begin_generation     any       unknown: versions are numbered anew

Besides, the protocol may *hold* the trainer: `trainer.wait_for_late` waits until the members that
it names have ended their steps (`protocol.hold`). A rank whose step end is awaited like that knows
so (`protocol.await_step`) and tells its peers, also where it skips an arrival
(`membership.take_awaited`).

With `one_at_a_time` a rank has at most one open version, because two averages that both contain one
snapshot of its model would move the model twice. Then it also takes part in about one version for
each of its steps, which bounds its traffic: every contribution that was made on its behalf while it
was computing gives it a *credit*, and for each credit it skips one arrival. `membership.quiesce`
ends all this before a generation changes: no version opens any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolPort,
    VersionResult,
)
from offbeat.averaging.background.merge_rules import MergeRule
from offbeat.codec.model_wire import Counters, Values, no_counters
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


class ModelState:
    """The model of a rank, its integer buffers and its step. Used under the lock of a
    `PublishedModel`.

    Args:
        make_rule: makes the merge rule that holds a model, once there is one.
        weight: the weight of this rank in averages, > 0.

    Attributes:
        step: how many steps the trainer has made, including those of the member whose model was
            adopted.
    """

    def __init__(self, make_rule: Callable[[Values], MergeRule], *, weight: float = 1.0) -> None:
        self.step = 0
        self._make_rule = make_rule
        self._weight = weight
        self._rule: MergeRule | None = None
        self._counters = no_counters()
        self._replaced = False

    @property
    def exists(self) -> bool:
        return self._rule is not None

    @property
    def is_under_way(self) -> bool:
        """Whether something that this rank has contributed may still come back, besides averages
        of open versions.
        """
        return False

    def averages_models(self, version: int) -> bool:
        """Whether `version` averages models, as opposed to gradients."""
        return True

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model."""
        self._rule, self._counters, self.step = self._make_rule(model), counters, step

    def forget(self) -> None:
        """From now on there is no model."""
        self._rule = None

    def advance(self, model: Sequence[Values], counters: Counters) -> bool:
        """The trainer has ended a step; see `MergeRule.advance`."""
        # A step that began with a model which was replaced meanwhile says nothing about the new
        # one.
        if not self._replaced:
            if not self._existing.advance(model):
                return False
            self._counters = counters
        self._replaced = False
        self.step += 1
        return True

    def take(self) -> Taken:
        """The trainer continues."""
        self._replaced = False
        values = self._existing.take()
        return Taken(values, self._counters, is_held=values is self._existing.held)

    def rebase(self, held: Values) -> None:
        """The trainer's model holds `held` instead of what it took."""
        self._existing.rebase(held)

    def adopt(self, model: Contribution) -> None:
        """Replace this rank's model by that of a member."""
        self._replaced = self._rule is not None
        self._rule, self._counters = self._make_rule(model.values.copy()), model.counters
        self.step = self.step if self._replaced else model.step

    def snapshot(self) -> Contribution:
        """The current model, as a contribution that is not fresh."""
        return self._contribution(self._existing.snapshot, fresh=False)

    def contribute(self, version: int, *, fresh: bool) -> Contribution | None:
        """What this rank contributes to `version`; None if it has nothing to contribute."""
        return self._contribution(self._existing.snapshot, fresh=fresh)

    def merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        """Merge averages of `version`."""
        if self._rule is None:
            return
        # Counters stay this rank's own. A rank that took over a larger count and went on from there
        # would count more steps than any rank has made.
        self._rule.merge(pieces)

    def finalize_version(self, version: int) -> None:
        """No further piece of `version` will come."""

    def begin_generation(self) -> None:
        """No piece of a version of the old generation will come."""

    def _contribution(self, values: Values, *, fresh: bool) -> Contribution:
        return Contribution(
            values=values,
            step=self.step,
            fresh=fresh,
            weight=self._weight,
            counters=self._counters,
        )

    @property
    def _existing(self) -> MergeRule:
        assert self._rule is not None, "begin must be called first"
        return self._rule


@dataclass(slots=True)
class _Arrival:
    """The trainer has arrived at a version that is not closed."""

    version: int
    has_quorum: bool = False


class PublishedModel:
    """The state object. Only the three ports read and change it.

    Args:
        model: the model, or the model and the gradients, that this rank averages.
        one_at_a_time: whether the rank takes part in one average at a time; else it arrives after
            every step, and contributes whenever a peer asks.
        max_credit: how many arrivals the rank skips at most for contributions on its behalf, >= 1.

    Attributes:
        trainer, protocol, membership: the ports.
    """

    def __init__(
        self, model: ModelState, *, one_at_a_time: bool = True, max_credit: int = 20
    ) -> None:
        self.model = model
        self.one_at_a_time = one_at_a_time
        self.max_credit = max_credit
        # One lock for everything: a port method is one transition, and callers wait on its
        # condition. It is re-entrant because transitions use each other.
        self.changed = threading.Condition(threading.RLock())
        self.counts = AveragingCounts()
        self.expelled = False
        self.error: Exception | None = None
        self.epoch = 0
        self.on_missing_model: Callable[[int], None] = lambda member: None
        self._reset()
        self.trainer = TrainerPort(self)
        self.protocol: ProtocolPort = _ProtocolPort(self)
        self.membership = MembershipPort(self)

    def _reset(self) -> None:
        """The state of a new generation."""
        self.quiescing = False
        self.open: set[int] = set()
        self.newest = -1
        self.invited: int | None = None
        self.arrival: _Arrival | None = None
        self.trainer_waits = False
        self.credit = 0
        self.awaited: int | None = None
        self.held_by: Set[int] = frozenset()
        self.given_up: Set[int] = frozenset()
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.received: dict[int, Contribution | None] = {}

    @property
    def is_available(self) -> bool:
        """Whether there is a model that peers may have."""
        return self.model.exists and not self.expelled

    @property
    def arrived_at(self) -> int | None:
        return None if self.arrival is None else self.arrival.version

    def begin_generation(self) -> None:
        self.epoch += 1
        self._reset()
        self.model.begin_generation()

    def adopt(self, model: Contribution) -> None:
        self.model.adopt(model)
        self.expelled = False
        self.changed.notify_all()

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error


class TrainerPort:
    """What the thread that trains may do."""

    def __init__(self, state: PublishedModel) -> None:
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
    def has_begun(self) -> bool:
        """Whether there is a model."""
        with self._state.changed:
            return self._state.model.exists

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model: `model`, which belongs to this object."""
        with self._state.changed:
            self._state.model.begin(model, counters, step=step)

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
            return self._state.model.advance(model, counters)

    def take(self) -> Taken:
        """The trainer continues."""
        with self._state.changed:
            return self._state.model.take()

    def rebase(self, held: Values) -> None:
        """The trainer's model holds `held` instead of what it took."""
        with self._state.changed:
            self._state.model.rebase(held)

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
            while True:
                state.raise_failure()
                skips = state.one_at_a_time and state.credit > 0 and state.invited is None
                if state.expelled or state.quiescing or skips:
                    state.credit = max(0, state.credit - 1)
                    return None
                version = max(state.newest + 1, state.invited or 0)
                if state.arrival is None and not (state.one_at_a_time and state.open):
                    break
                if not must_wait(version):
                    return None
                state.changed.wait()
            state.arrival, state.invited = _Arrival(version), None
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


class _ProtocolPort(ProtocolPort):
    """What the thread that runs the protocol may do; see `interface.ProtocolPort`."""

    def __init__(self, state: PublishedModel) -> None:
        self._state = state

    @override
    def contribute(self, version: int) -> Contribution | None:
        state = self._state
        with state.changed:
            state.newest = max(state.newest, version)
            if state.invited is not None and state.invited <= version:
                state.invited = None  # the version proceeds without this rank's arrival
            if not state.is_available or state.quiescing:
                return None
            if (
                state.one_at_a_time
                and state.open
                and state.model.averages_models(version)
                and version != state.arrived_at
            ):
                return None
            # A trainer that waits has ended its step, so its model is fresh at any version.
            fresh = version == state.arrived_at or state.trainer_waits
            mine = state.model.contribute(version, fresh=fresh)
            if mine is not None:
                state.open.add(version)
            state.credit = min(state.credit + (not fresh), state.max_credit)
            return mine

    @override
    def invite(self, version: int) -> None:
        with self._state.changed:
            self._state.invited = max(version, self._state.invited or 0)

    @override
    def quorum_arrived(self, version: int) -> None:
        state = self._state
        with state.changed:
            if state.arrival is not None and state.arrival.version == version:
                state.arrival.has_quorum = True
                state.changed.notify_all()

    @override
    def await_step(self, version: int) -> bool:
        with self._state.changed:
            computes = not self._state.trainer_waits
            self._state.awaited = version if computes else None
            return computes

    @override
    def hold(self, late: Set[int]) -> None:
        with self._state.changed:
            self._state.held_by = late
            self._state.given_up &= late
            self._state.changed.notify_all()

    @override
    def close(self, result: VersionResult) -> None:
        state = self._state
        with state.changed:
            state.model.merge(result.version, result.pieces)
            notes = result.members.values()
            state.counts.made += bool(result.pieces)
            state.counts.missed += not result.pieces
            state.counts.contributions += len(notes)
            state.counts.stale += sum(not note.fresh for note in notes)
            state.open.discard(result.version)
            if result.version == state.arrived_at:
                state.arrival = None
            state.changed.notify_all()

    @override
    def merge_late(self, version: int, piece: Piece) -> None:
        with self._state.changed:
            self._state.model.merge(version, (piece,))

    @override
    def finalize_version(self, version: int) -> None:
        with self._state.changed:
            self._state.model.finalize_version(version)
            self._state.changed.notify_all()

    @override
    def snapshot(self) -> Contribution | None:
        with self._state.changed:
            return self._state.model.snapshot() if self._state.is_available else None

    @override
    def receive_model(self, sender: int, model: Contribution | None) -> None:
        state = self._state
        with state.changed:
            if state.is_available:  # it was asked for a mean of all models
                state.received[sender] = model
                state.changed.notify_all()
                return
            if model is not None:  # it was asked for by a rank that has none
                state.adopt(model)
                return
        # Outside the lock: the callback asks the next member, and posts to the protocol.
        state.on_missing_model(sender)

    @override
    def mark_dead(self, rank: int) -> None:
        with self._state.changed:
            self._state.dead.add(rank)
            self._state.changed.notify_all()
        self._state.on_missing_model(rank)

    @override
    def mark_stopped(self, rank: int) -> None:
        with self._state.changed:
            self._state.stopped.add(rank)
            self._state.changed.notify_all()


class MembershipPort:
    """What the owner of the progress thread may do, in the trainer's thread or the membership's.

    Generations are counted here in epochs. A call that waits for members is told the epoch in which
    it began, and ends when that is over.
    """

    def __init__(self, state: PublishedModel) -> None:
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

    def wait_until_stopped(self, members: frozenset[int], epoch: int) -> bool:
        """Wait until all of `members` that live take no more steps. Returns False when the
        generation has changed.
        """
        state = self._state
        with state.changed:
            return self._wait_in(epoch, lambda: members <= state.dead | state.stopped)

    def _wait_in(
        self, epoch: int, until: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        state = self._state
        state.changed.wait_for(
            lambda: until() or state.error is not None or state.epoch != epoch, timeout_s
        )
        state.raise_failure()
        return state.epoch == epoch
