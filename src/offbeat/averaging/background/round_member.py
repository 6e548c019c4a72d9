"""What every way to average in groups has in common: who rests, has finished or is dead, and who
asks for whose model.

A `Member` takes messages and times and gives messages; `attend` carries them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set

from offbeat.averaging.background.group_base import (
    Contribution,
    Happenings,
    Replica,
    Terms,
    check_model,
)
from offbeat.codec.model_wire import Kind, ModelMessage
from offbeat.errors import PeerError, PeerTimeoutError, WireError
from offbeat.transport.operations import Collective, Now, Payload, RecvAny, Send

_FROM_ONESELF = (Kind.ARRIVE, Kind.SEEK, Kind.REST, Kind.FINISH)


class Member(ABC):
    """One rank's side of a generation. What becomes of arrivals, parts and averages is for those
    who extend it to say.
    """

    def __init__(self, rank: int, terms: Terms, replica: Replica, happenings: Happenings) -> None:
        self.happenings = happenings
        self._rank = rank
        self._terms = terms
        self._replica = replica
        self._outgoing: list[tuple[int, bytes]] = []
        self._asked: set[int] = set()
        self._askers: list[int] = []
        self._finished: set[int] = set()

    @property
    def audience(self) -> frozenset[int]:
        return frozenset(self._terms.members) - self.happenings.dead

    @property
    def done(self) -> bool:
        """Whether this rank and all that live have finished, and nothing is owed to it."""
        return self._finished >= self.audience and not (
            self._asked & self.audience or self._is_busy()
        )

    def take_outgoing(self) -> list[tuple[int, bytes]]:
        if self._askers and not self._is_settling():
            state = self._state()
            self._outgoing += [(asker, state) for asker in self._askers]
            self._askers = []
        taken, self._outgoing = self._outgoing, []
        return [(peer, message) for peer, message in taken if peer not in self.happenings.dead]

    def take(self, sender: int, payload: Payload, now_s: float) -> None:
        message = ModelMessage.from_bytes(payload)
        if message.generation != self._terms.generation:
            self.happenings.foreign += 1
            return
        if (sender == self._rank) != (message.kind in _FROM_ONESELF):
            raise WireError(
                f"rank {sender} sent rank {self._rank} a message of kind {message.kind.name}, which"
                " it cannot"
            )
        self.happenings.suspected.discard(sender)
        match message.kind:
            case Kind.REST:
                self._rest(sender)
                self._tell(Kind.RESTED, self.audience - {self._rank})
            case Kind.FINISH:
                self._finish(sender)
                self._tell(Kind.FINISHED, self.audience - {self._rank})
            case Kind.RESTED:
                self._rest(sender)
            case Kind.FINISHED:
                self._finish(sender)
            case Kind.SEEK:
                self._seek(message.version, now_s)
            case Kind.ASK:
                self._askers.append(sender)
            case Kind.STATE:
                self._receive(sender, message)
            case _:
                self._take(sender, message, now_s)
        self._go_on(now_s)

    def bury(self, rank: int, now_s: float) -> None:
        """The driver says that `rank` is dead."""
        self.happenings.dead.add(rank)
        self.happenings.suspected.discard(rank)
        self._replica.bury(rank)
        self._do_without(rank)
        self._go_on(now_s)

    @abstractmethod
    def time_left_s(self, now_s: float) -> float | None:
        """Until the earliest deadline; None: nobody is waited for that might be suspected."""

    @abstractmethod
    def lose_patience(self, now_s: float) -> None:
        """The earliest deadline has passed."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether some version is under way, or something may still come of it."""

    @abstractmethod
    def _is_settling(self) -> bool:
        """Whether an average that others may have taken in already is about to come; who asks for
        the model gets it then.
        """

    @abstractmethod
    def _take(self, sender: int, message: ModelMessage, now_s: float) -> None:
        """Take in a message of a version. Raises `WireError`."""

    @abstractmethod
    def _do_without(self, rank: int) -> None:
        """Wait for nothing from `rank` any more."""

    @abstractmethod
    def _go_on(self, now_s: float) -> None:
        """Something happened: let every version go as far as it gets without waiting."""

    def _absent(self) -> set[int]:
        return self.happenings.dead | self.happenings.suspected

    def _contribution(self, version: int) -> Contribution | None:
        return self._own(self._replica.contribute(version))

    def _own(self, mine: Contribution | None) -> Contribution | None:
        assert mine is None or mine.counters.size == self._terms.num_counters, (
            "Terms.num_counters is not that of the replica"
        )
        return mine

    def _tell(self, kind: Kind, peers: Set[int]) -> None:
        note = ModelMessage(kind=kind, generation=self._terms.generation).to_bytes()
        self._outgoing += [(peer, note) for peer in sorted(peers)]

    def _rest(self, rank: int) -> None:
        if rank not in self.happenings.resting:
            self.happenings.resting.add(rank)
            self._replica.rested(rank)

    def _finish(self, rank: int) -> None:
        self._finished.add(rank)
        self._rest(rank)

    def _seek(self, peer: int, now_s: float) -> None:
        assert peer != self._rank, "a rank has its own model without asking"
        if peer >= 0 and peer not in self._terms.members:
            if peer not in self.happenings.dead:
                self.bury(peer, now_s)
            return
        asked = self.audience - {self._rank} if peer < 0 else {peer}
        self._asked |= asked
        self._tell(Kind.ASK, asked)

    def _state(self) -> bytes:
        return self._message(Kind.STATE, self._own(self._replica.snapshot())).to_bytes()

    def _message(self, kind: Kind, mine: Contribution | None, *, version: int = -1) -> ModelMessage:
        """The whole model, or none."""
        generation, num_elements = self._terms.generation, self._terms.num_elements
        if mine is None:
            return ModelMessage(
                kind=kind, generation=generation, version=version, num_elements=num_elements
            )
        return ModelMessage(
            kind=kind,
            generation=generation,
            version=version,
            step=mine.step,
            fresh=mine.fresh,
            weight=mine.weight,
            num_elements=num_elements,
            counters=mine.counters,
            values=mine.values,
        )

    def _receive(self, sender: int, message: ModelMessage) -> None:
        self._asked.discard(sender)
        has_values = message.weight > 0
        check_model(
            sender, message, self._terms, 0, self._terms.num_elements, has_values=has_values
        )
        state = Contribution(
            values=message.values,
            step=message.step,
            fresh=message.fresh,
            weight=message.weight,
            counters=message.counters,
        )
        self._replica.receive(sender, state if has_values else None)


def attend(member: Member) -> Collective[Happenings]:
    """Carry messages to and from `member` until it is done."""
    while True:
        for peer, message in member.take_outgoing():
            yield Send(peer, message)
        if member.done:
            return member.happenings
        now_s = yield Now()
        try:
            sender, payload = yield RecvAny(member.audience, member.time_left_s(now_s))
        except PeerTimeoutError:
            member.lose_patience((yield Now()))
        except PeerError as error:
            if error.rank is None:
                raise
            member.bury(error.rank, (yield Now()))
        else:
            member.take(sender, payload, (yield Now()))
