"""What one rank's side of the group averages decides: which versions are under way, what each waits
for, whom to suspect.

Takes messages and times, gives messages; `group_member.attend` carries them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from typing import Literal, TypeAlias

from offbeat.averaging.background.deadlines import Patience, deadline_s
from offbeat.averaging.background.group_base import Happenings, Outcome, Replica, Terms
from offbeat.averaging.background.round_member import Member
from offbeat.averaging.background.rounds import Direct, Round, Scattered
from offbeat.codec.model_wire import Kind, ModelMessage
from offbeat.errors import WireError
from offbeat.planning.groups import Meeting

Phase: TypeAlias = Literal["arrivals", "answers", "averages"]
"""What a round waits for: that enough arrive, that all contribute, or that the owners of regions
send averages.
"""

_MAX_DIRECT_GROUP = 64
_REMEMBERED_VERSIONS = 4096


class _Attended:
    """A round and when it began to wait for what.

    Attributes:
        announced: who has arrived by its own word.
        gathered: whether enough have arrived, and the replica knows.
    """

    def __init__(self, round_: Round, meeting: Meeting, now_s: float) -> None:
        self.round = round_
        self.meeting = meeting
        self.opened_s = now_s
        self.phase: Phase = "arrivals"
        self.called_s = math.inf
        self.averaged_s = math.inf
        self.deadline_s = math.inf
        self.announced: set[int] = set()
        self.gathered = False

    @property
    def waits_for_all(self) -> bool:
        return self.meeting.min_fresh == len(self.meeting.group)


class Attendant(Member):
    """Keeps a rank's rounds going."""

    def __init__(self, rank: int, terms: Terms, replica: Replica, happenings: Happenings) -> None:
        super().__init__(rank, terms, replica, happenings)
        self._rounds: dict[int, _Attended] = {}
        self._over: dict[int, float] = {}
        self._newest = -1
        self._arrived = -1
        patience: dict[Phase, Patience] = {
            "arrivals": terms.arrival_patience,
            "answers": terms.patience,
            "averages": terms.patience,
        }
        self._patience = patience
        self._waits_s: dict[Phase, deque[float]] = {
            phase: deque(maxlen=patience[phase].window) for phase in patience
        }

    def time_left_s(self, now_s: float) -> float | None:
        earliest_s = min(
            (attended.deadline_s for attended in self._rounds.values()), default=math.inf
        )
        return None if earliest_s == math.inf else max(0.0, earliest_s - now_s)

    def lose_patience(self, now_s: float) -> None:
        late = min(self._rounds.values(), key=lambda attended: attended.deadline_s)
        if late.phase == "arrivals":
            # Those who are called now arrive unheard: how long it would have taken is only to be
            # learned by trying longer.
            self._waits_s["arrivals"].append(2 * (now_s - late.opened_s))
            self._call(late, now_s)
        else:
            silent = late.round.awaited() - self._absent()
            self.happenings.suspected |= silent
            self.happenings.suspicions += len(silent)
        self._go_on(now_s)

    def _is_busy(self) -> bool:
        return bool(self._rounds)

    def _is_settling(self) -> bool:
        return any(
            attended.gathered and not attended.round.over for attended in self._rounds.values()
        )

    def _take(self, sender: int, message: ModelMessage, now_s: float) -> None:
        if message.kind == Kind.ARRIVE:
            self._arrive(message.version, now_s)
        elif message.version not in self._rounds and self._is_past(message.version):
            self._take_late(message, now_s)
        else:
            self._take_in(sender, message, now_s)

    def _do_without(self, rank: int) -> None:
        for attended in self._rounds.values():
            attended.round.bury(rank)

    def _open(self, version: int, now_s: float) -> _Attended:
        meeting = self._terms.meeting(version)
        attended = _Attended(
            _new_round(version, meeting.group, self._rank, self._terms), meeting, now_s
        )
        if 1 < meeting.min_fresh < len(meeting.group):
            attended.deadline_s = now_s + self._deadline_s("arrivals")
        self._rounds[version] = attended
        return attended

    def _is_past(self, version: int) -> bool:
        return version in self._over or self._is_forgotten(version)

    def _arrive(self, version: int, now_s: float) -> None:
        self._arrived = max(self._arrived, version)
        if self._is_past(version):
            return
        attended = self._rounds.get(version) or self._open(version, now_s)
        if not attended.round.contributed:
            self.happenings.arrivals += 1
            self._contribute(attended)

    def _contribute(self, attended: _Attended) -> None:
        version, group = attended.round.version, attended.round.group
        mine = self._contribution(version)
        arrived = version <= self._arrived or (mine is not None and mine.fresh)
        if (
            arrived
            and attended.meeting.min_fresh > 1
            and not _is_small(version, group, self._terms)
        ):
            # ahead of the parts, which may take long: whoever waits for arrivals alone can go on
            word = ModelMessage(
                kind=Kind.ARRIVED, generation=self._terms.generation, version=version
            ).to_bytes()
            self._outgoing += [(peer, word) for peer in group if peer != self._rank]
        absent = self.happenings.dead if attended.waits_for_all else self._absent()
        self._outgoing += attended.round.contribute(mine, absent, arrived=arrived)

    def _take_late(self, message: ModelMessage, now_s: float) -> None:
        self._count(message, is_late=True)
        if message.kind == Kind.PART:
            self._observe("answers", self._over.get(message.version, math.inf), now_s)

    def _take_in(self, sender: int, message: ModelMessage, now_s: float) -> None:
        version, is_new = message.version, message.version not in self._rounds
        attended = self._open(version, now_s) if is_new else self._rounds[version]
        if sender not in attended.round.group:
            raise WireError(
                f"rank {sender} sent a message of version {version}, in which rank {self._rank}"
                f" meets {attended.round.group}; do all ranks have the same options?"
            )
        match message.kind:
            case Kind.ARRIVED:
                attended.announced.add(sender)
            case Kind.AVERAGE:
                self._observe("averages", attended.averaged_s, now_s)
                self._count(message, is_late=attended.round.take(sender, message))
            case _:
                self._observe("answers", attended.called_s, now_s)
                self._count(message, is_late=attended.round.take(sender, message))
        is_resting = self._rank in self.happenings.resting
        if is_new and not is_resting and not self._is_called(attended):
            self._replica.invite(version)

    def _observe(self, phase: Phase, since_s: float, now_s: float) -> None:
        """Learn from an answer; those that came before this rank began to wait say nothing about
        how long to wait.
        """
        if since_s <= now_s:
            self._waits_s[phase].append(now_s - since_s)

    def _count(self, message: ModelMessage, *, is_late: bool) -> None:
        self.happenings.late_parts += is_late and message.kind == Kind.PART
        self.happenings.late_averages += is_late and message.kind == Kind.AVERAGE

    def _is_called(self, attended: _Attended) -> bool:
        """Whether all must contribute now. Where all wait for all, their parts are waited for
        without a deadline.
        """
        return self._are_enough(
            attended, frozenset() if attended.waits_for_all else attended.announced
        )

    def _are_enough(self, attended: _Attended, announced: Set[int]) -> bool:
        """Whether enough have arrived; those that will not come are not waited for."""
        gone = self.happenings.dead | self.happenings.resting
        if not attended.waits_for_all:
            gone = gone | self.happenings.suspected
        return attended.round.is_called(attended.meeting.min_fresh, gone, announced)

    def _call(self, attended: _Attended, now_s: float) -> None:
        """Enough have arrived: from now on the network is all that is waited for."""
        if not attended.round.contributed:
            self.happenings.answers += 1
            self._contribute(attended)
        attended.phase, attended.called_s = "answers", now_s
        attended.deadline_s = now_s + self._deadline_s("answers")

    def _deadline_s(self, phase: Phase) -> float:
        return deadline_s(self._waits_s[phase], self._patience[phase])

    def _go_on(self, now_s: float) -> None:
        for attended in list(self._rounds.values()):
            round_ = attended.round
            if round_.version <= self._arrived and not round_.contributed:
                self._contribute(
                    attended
                )  # whoever waits for this rank to arrive there would wait for ever
            if attended.phase == "arrivals" and self._is_called(attended):
                if attended.meeting.min_fresh > 1:
                    self._observe("arrivals", attended.opened_s, now_s)
                self._call(attended, now_s)
            while (
                attended.phase != "arrivals"
                and not round_.over
                and round_.awaited() <= self._absent()
            ):
                self._outgoing += round_.go_on(self._absent())
                attended.phase, attended.averaged_s = "averages", now_s
                attended.deadline_s = now_s + self._deadline_s("averages")
            if round_.over:
                self._close(attended, now_s)
            elif not attended.gathered and self._has_gathered(attended):
                attended.gathered = True
                self._replica.gathered(round_.version)

    def _has_gathered(self, attended: _Attended) -> bool:
        is_in = attended.round.contributed
        return attended.phase != "arrivals" or (
            is_in and self._are_enough(attended, attended.announced)
        )

    def _close(self, attended: _Attended, now_s: float) -> None:
        round_ = attended.round
        version, pieces = round_.version, round_.take_pieces()
        if version in self._over:
            for piece in pieces:
                self._replica.amend(version, piece)
        else:
            self._remember(version, attended.called_s)
            attended.deadline_s = math.inf
            if round_.debtors():
                round_.keep_for_late_pieces()
            pieces.sort(key=lambda piece: piece.begin)
            self._replica.close(
                Outcome(
                    version=version,
                    group=round_.group,
                    pieces=tuple(pieces),
                    opened_s=attended.opened_s,
                    closed_s=now_s,
                )
            )
        if not round_.debtors():
            del self._rounds[version]
            self._replica.settle(version)

    def _remember(self, version: int, called_s: float) -> None:
        self._over[version] = called_s
        self._newest = max(self._newest, version)
        if len(self._over) > 2 * _REMEMBERED_VERSIONS:
            self._over = {
                known: when_s
                for known, when_s in self._over.items()
                if not self._is_forgotten(known)
            }

    def _is_forgotten(self, version: int) -> bool:
        return version < self._newest - _REMEMBERED_VERSIONS


def _new_round(version: int, group: tuple[int, ...], rank: int, terms: Terms) -> Round:
    is_direct = len(group) <= 2 or (
        _is_small(version, group, terms) and len(group) <= _MAX_DIRECT_GROUP
    )
    return (Direct if is_direct else Scattered)(version, group, rank=rank, terms=terms)


def _is_small(version: int, group: tuple[int, ...], terms: Terms) -> bool:
    """Whether everyone can send everything to everyone in next to no time."""
    return (len(group) - 1) * terms.length(version) * terms.dtype.itemsize <= terms.direct_bytes
