"""Wait-avoiding group averaging, the protocol of WAGMA-SGD (arXiv 2005.00124, algorithm 2).

No rank waits for one that computes. What happens at a rank in version t:

    the trainer arrives at t:        the rank contributes its model, which is fresh, to its group
    a message of t arrives, and the  the last snapshot of the model is contributed on its behalf,
    rank has not contributed to t:   which is stale; the trainer computes on
    the trainer arrives later:       it sends nothing, and finds the average of t in its model
    all contributions are here:      they are averaged by weight and merged

Each rank runs one collective, `RoundManager.serve`, in a thread beside its trainer for as long as
the generation lasts. It asks the `SharedModel` of its rank for contributions and hands it the
averages.

Differences from the paper:
- The world and the groups may have any size, and members may be late, stop or die. Every average
  lists its contributions (`Piece.notes`) and is divided by the sum of their weights.
- The message that activates a version goes to the members of the group alone, not over a tree of
  all ranks. Therefore groups do not delay each other, and ranks may be at different versions.
- The whole model is averaged in one version, as one contribution.
- `VersionGroup.min_arrivals` says how many arrivals a version waits for before the snapshots of the
  other members are contributed. A group average waits for one; a global synchronization waits for a
  quorum, or for all as in the paper. An arrival is announced in a small message before the model is
  sent, so that trainers need not wait for the network (`SharedModel.quorum_arrived`).

Quorums alone do not bound how old a snapshot may be. `VersionGroup.catch_up` does: a trainer that
has come to a global synchronization begins no further step before every member has arrived at an
earlier one, `catch_up`, or later (`SharedModel.hold`). A rank that contributed to a global
synchronization before it arrived therefore tells all members when its step ends. Averages go on
meanwhile, and no rank is waited for that is suspected, dead or takes no more steps.

A peer that does not answer within a deadline learned from earlier answers is *suspected*: no rank
waits for it and it is sent no values, until a message of it arrives. A peer that is *dead*, as the
driver says, is left out for good. A late contribution is ignored. A late average is
merged when it arrives (`SharedModel.merge_late`). A suspicion therefore costs time and mixing, but
changes no weight.

Bytes for a rank and version, for a model of N bytes and a group of S: at most 2 N (S-1) / S, or
(S-1) N where the model is small; half of that where values are rounded; 80 bytes a message, 24 a
member and average, 8 a counter, and 80 a peer for the announcement of an arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Set
from typing import Literal, TypeAlias

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.deadlines import DeadlineRule, deadline_s
from offbeat.averaging.background.interface import ProtocolCounts, ProtocolSettings, VersionResult
from offbeat.averaging.background.protocol_member import ProtocolMember
from offbeat.averaging.background.rounds import DirectRound, GroupRound, ScatteredRound
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import MessageKind, ModelMessage
from offbeat.errors import WireError

Phase: TypeAlias = Literal["arrivals", "contributions", "averages"]
"""What a round waits for: that enough members arrive, that all contribute, or that the owners of
regions send their averages.
"""

_MAX_DIRECT_GROUP = 64
_REMEMBERED_VERSIONS = 4096


class RoundManager(ProtocolMember):
    """Opens, advances and closes the rounds of one rank."""

    def __init__(self, rank: int, settings: ProtocolSettings, model: SharedModel) -> None:
        super().__init__(rank, settings, model)
        self._rounds: dict[int, ManagedRound] = {}
        self._closed = ClosedVersions()
        self._arrived = -1
        self._arrivals: dict[int, int] = {}  # the newest version at which each peer has arrived
        self._catch_up = -1
        self._held_by: frozenset[int] = frozenset()
        self._late_at: int | None = None  # the version after which peers await the end of the step
        self._rules: dict[Phase, DeadlineRule] = {
            "arrivals": settings.arrival_deadline,
            "contributions": settings.reply_deadline,
            "averages": settings.reply_deadline,
        }
        self._waits_s: dict[Phase, deque[float]] = {
            phase: deque(maxlen=rule.window) for phase, rule in self._rules.items()
        }

    # What happens to a version, in this order

    def _arrive(self, version: int, now_s: float) -> None:
        """The trainer of this rank has arrived at `version`."""
        self._arrived = max(self._arrived, version)
        if self._late_at is not None:
            self._tell(MessageKind.ARRIVED, self.live_peers, version=self._late_at)
            self._late_at = None
        if version in self._closed:
            return
        managed = self._rounds.get(version) or self._open(version, now_s)
        if not managed.round.contributed:
            self._contribute(managed)

    def _open(self, version: int, now_s: float) -> ManagedRound:
        group = self._settings.group_of(version)
        if group.catch_up is not None:
            self._catch_up = max(self._catch_up, group.catch_up)
        managed = ManagedRound(
            version, group, rank=self._rank, settings=self._settings, now_s=now_s
        )
        # A version that waits for one arrival has it already; one that waits for all has no
        # deadline, since all ranks must take part in it.
        if 1 < group.min_arrivals < len(group.ranks):
            managed.deadline_s = now_s + self._deadline_s("arrivals")
        self._rounds[version] = managed
        return managed

    def _contribute(self, managed: ManagedRound) -> None:
        version, group = managed.round.version, managed.round.group
        mine = self._contribution(version)
        arrived = version <= self._arrived or (mine is not None and mine.fresh)
        if not arrived and managed.group.catch_up is not None:
            # A trainer that waits has ended its step, although it may have to stay out of this one.
            arrived = not self._model.await_step(version)
            self._late_at = None if arrived else version
        if arrived and managed.group.min_arrivals > 1 and not managed.is_small:
            # The announcement goes ahead of the chunks, which may take long: a trainer that waits
            # for arrivals only can then continue.
            self._tell(MessageKind.ARRIVED, frozenset(group) - {self._rank}, version=version)
        # Where all wait for all, suspected peers get the values too: they are waited for.
        absent = self.counts.dead if managed.waits_for_all else self._absent()
        self._outgoing += managed.round.contribute(mine, absent, arrived=arrived)

    def _call_contributions(self, managed: ManagedRound, now_s: float) -> None:
        """Enough members have arrived, so all must contribute. From now on the round waits for the
        network only.
        """
        if not managed.round.contributed:
            self._contribute(managed)
        managed.phase, managed.contributions_due_s = "contributions", now_s
        managed.deadline_s = now_s + self._deadline_s("contributions")

    def _advance(self, now_s: float) -> None:
        # Before a trainer is told that it may go on.
        self._update_hold()
        for managed in list(self._rounds.values()):
            round_ = managed.round
            # A rank that has arrived at a later version counts as arrived here. It must say so, or
            # peers that wait for its arrival at this version would wait for ever.
            if round_.version <= self._arrived and not round_.contributed:
                self._contribute(managed)
            if managed.phase == "arrivals" and managed.must_contribute(self.counts):
                if managed.group.min_arrivals > 1:
                    self._learn("arrivals", managed.opened_s, now_s)
                self._call_contributions(managed, now_s)
            while (
                managed.phase != "arrivals"
                and not round_.over
                and round_.awaited() <= self._absent()
            ):
                self._outgoing += round_.proceed_without(self._absent())
                managed.phase, managed.averages_due_s = "averages", now_s
                managed.deadline_s = now_s + self._deadline_s("averages")
            if round_.over:
                self._close(managed)
            elif not managed.quorum_arrived and managed.has_quorum(self.counts):
                managed.quorum_arrived = True
                self._model.quorum_arrived(round_.version)

    def _update_hold(self) -> None:
        """Let the trainer wait for the members that have not caught up, and for no others."""
        late = frozenset(
            peer
            for peer in self.live_peers - self.counts.suspected - self.counts.stopped
            if self._arrivals.get(peer, -1) < self._catch_up
        )
        if late != self._held_by:
            self._held_by = late
            self._model.hold(late)

    def _close(self, managed: ManagedRound) -> None:
        """Hand over what has arrived. The round is kept as long as late pieces may arrive."""
        round_ = managed.round
        version, pieces = round_.version, round_.take_pieces()
        if version in self._closed:
            for piece in pieces:
                self._model.merge_late(version, piece)
        else:
            self._closed.add(version, managed.contributions_due_s)
            managed.deadline_s = math.inf
            pieces.sort(key=lambda piece: piece.begin)
            self._model.close_version(
                VersionResult(version=version, group=round_.group, pieces=tuple(pieces))
            )
        if not round_.late_senders():
            del self._rounds[version]
            self._model.finalize_version(version)

    # Messages of peers

    def _receive_of_version(self, sender: int, message: ModelMessage, now_s: float) -> None:
        if message.arrived or message.kind == MessageKind.ARRIVED:
            self._arrivals[sender] = max(self._arrivals.get(sender, -1), message.version)
        if message.kind == MessageKind.ARRIVE:
            self._arrive(message.version, now_s)
        elif message.version not in self._rounds and message.version in self._closed:
            if message.kind == MessageKind.CHUNK:
                self._learn("contributions", self._closed.due_s(message.version), now_s)
        else:
            self._receive_in_round(sender, message, now_s)

    def _receive_in_round(self, sender: int, message: ModelMessage, now_s: float) -> None:
        version, is_new = message.version, message.version not in self._rounds
        managed = self._open(version, now_s) if is_new else self._rounds[version]
        if sender not in managed.round.group:
            raise WireError(
                f"rank {sender} sent a message of version {version}, in which rank {self._rank}"
                f" averages with {managed.round.group}; do all ranks have the same options?"
            )
        match message.kind:
            case MessageKind.ARRIVED:
                managed.announced.add(sender)
            case MessageKind.AVERAGE:
                self._learn("averages", managed.averages_due_s, now_s)
                managed.round.receive(sender, message)
            case _:
                self._learn("contributions", managed.contributions_due_s, now_s)
                managed.round.receive(sender, message)
        has_stopped = self._rank in self.counts.stopped
        if is_new and not has_stopped and not managed.must_contribute(self.counts):
            self._model.invite(version)

    def _forget_rank(self, rank: int) -> None:
        for managed in self._rounds.values():
            managed.round.mark_dead(rank)

    # Deadlines

    def _deadlines_s(self) -> Iterable[float]:
        return (managed.deadline_s for managed in self._rounds.values())

    def on_deadline(self, now_s: float) -> None:
        late = min(self._rounds.values(), key=lambda managed: managed.deadline_s)
        if late.phase == "arrivals":
            # After the call below, the members' arrivals are not observed any more. How long they
            # would have taken can be learned only by waiting longer the next time.
            self._waits_s["arrivals"].append(2 * (now_s - late.opened_s))
            self._call_contributions(late, now_s)
        else:
            silent = late.round.awaited() - self._absent()
            self.counts.suspected |= silent
            self.counts.suspicions += len(silent)
        self._advance(now_s)

    def _learn(self, phase: Phase, due_s: float, now_s: float) -> None:
        """Learn how long a message takes. One that came before this rank began to wait for it
        tells nothing.
        """
        if due_s <= now_s:
            self._waits_s[phase].append(now_s - due_s)

    def _deadline_s(self, phase: Phase) -> float:
        return deadline_s(self._waits_s[phase], self._rules[phase])

    # What is under way

    def _is_busy(self) -> bool:
        return bool(self._rounds)

    def _is_average_due(self) -> bool:
        return any(
            managed.quorum_arrived and not managed.round.over for managed in self._rounds.values()
        )


class ManagedRound:
    """A round, what it waits for, and since when.

    Args:
        version: the number of the version.
        group: its group.
        rank: this rank.
        settings: what the members agree on.
        now_s: when this rank learned of the version.

    Attributes:
        announced: the ranks that have announced their arrival.
        quorum_arrived: whether enough have arrived, and the model has been told.
        contributions_due_s: when all members had to contribute.
        averages_due_s: when this rank had averaged its own region.
    """

    def __init__(
        self,
        version: int,
        group: VersionGroup,
        *,
        rank: int,
        settings: ProtocolSettings,
        now_s: float,
    ) -> None:
        size = len(group.ranks)
        num_bytes = settings.scale * settings.num_elements * settings.bytes_per_element(version)
        # Whether the model is so small that each member can send all of it to all others.
        self.is_small = (size - 1) * num_bytes <= settings.direct_bytes
        is_direct = size <= 2 or (self.is_small and size <= _MAX_DIRECT_GROUP)
        kind = DirectRound if is_direct else ScatteredRound
        self.round: GroupRound = kind(version, group.ranks, rank=rank, settings=settings)
        self.group = group
        self.opened_s = now_s
        self.phase: Phase = "arrivals"
        self.contributions_due_s = math.inf
        self.averages_due_s = math.inf
        self.deadline_s = math.inf
        self.announced: set[int] = set()
        self.quorum_arrived = False

    @property
    def waits_for_all(self) -> bool:
        return self.group.min_arrivals == len(self.group.ranks)

    def must_contribute(self, counts: ProtocolCounts) -> bool:
        """Whether all members must contribute now.

        Where all wait for all, an announcement does not count here: the chunks are waited for
        without a deadline, so that all that take part get the same average.
        """
        return self._is_quorum(counts, frozenset() if self.waits_for_all else self.announced)

    def has_quorum(self, counts: ProtocolCounts) -> bool:
        """Whether the trainer of this rank may stop waiting for arrivals."""
        return self.phase != "arrivals" or (
            self.round.contributed and self._is_quorum(counts, self.announced)
        )

    def _is_quorum(self, counts: ProtocolCounts, announced: Set[int]) -> bool:
        """Whether enough members have arrived; members that will not arrive are not waited for."""
        absent = counts.dead | counts.stopped
        if not self.waits_for_all:
            absent = absent | counts.suspected
        return self.round.must_contribute(self.group.min_arrivals, absent, announced)


class ClosedVersions:
    """The versions that a rank has closed: the latest by number, and all that are much older."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}
        self._newest = -1

    def __contains__(self, version: int) -> bool:
        return version in self._due_s or self._is_forgotten(version)

    def add(self, version: int, due_s: float) -> None:
        """`version` is closed; its contributions were due at `due_s`."""
        self._due_s[version] = due_s
        self._newest = max(self._newest, version)
        if len(self._due_s) > 2 * _REMEMBERED_VERSIONS:
            self._due_s = {
                known: when_s
                for known, when_s in self._due_s.items()
                if not self._is_forgotten(known)
            }

    def due_s(self, version: int) -> float:
        """When the contributions to `version` were due; infinite where that is not known."""
        return self._due_s.get(version, math.inf)

    def _is_forgotten(self, version: int) -> bool:
        return version < self._newest - _REMEMBERED_VERSIONS
