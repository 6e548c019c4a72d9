"""What both averaging protocols have in common: one rank's member of a generation.

A `ProtocolMember` takes messages and times and gives messages; its `serve` carries them over a
driver. The member keeps account of the peers that have stopped, have finished or are dead, and
answers requests for models. What it does with arrivals, chunks and averages is the business of the
two subclasses, `group_average.RoundManager` and `strategies.adpsgd.PairMember`.

The trainer of a rank speaks to its own member by posting messages without values:

- ARRIVE when it has ended a step. From then on, and until the version is closed,
  `SharedModel.contribute` must be fresh.
- FETCH_MODEL to request the model of member `version`, or of every living peer if that is negative.
  The answers come to `SharedModel.receive_model`. For a peer that is dead there is only
  `SharedModel.mark_dead`. The protocol does not return before the answers to requests made before
  FINISH have arrived.
- STOP_STEPPING when it takes no more steps. Its member still contributes when peers need it, and no
  peer waits for the rank to arrive.
- FINISH last. It implies STOP_STEPPING. The protocol returns when all members have finished or are
  dead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial

from offbeat.averaging.background.interface import (
    Contribution,
    ProtocolCounts,
    ProtocolSettings,
    check_values,
)
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import MessageKind, ModelMessage
from offbeat.errors import PeerError, PeerTimeoutError, WireError
from offbeat.transport.operations import Collective, Now, Payload, RecvAny, Send

_FROM_THIS_RANK = (
    MessageKind.ARRIVE,
    MessageKind.FETCH_MODEL,
    MessageKind.STOP_STEPPING,
    MessageKind.FINISH,
)


class ProtocolMember(ABC):
    """One rank's member of a generation.

    Attributes:
        counts: what it has counted, and what it knows of its peers.
        live_peers: the other members that are not dead.
        sources: the ranks from which messages may arrive: the living peers, and this rank's
            trainer.
    """

    def __init__(self, rank: int, settings: ProtocolSettings, model: SharedModel) -> None:
        self.counts = ProtocolCounts()
        self._rank = rank
        self._settings = settings
        self._model = model
        self._outgoing: list[tuple[int, Payload]] = []
        self._asked: set[int] = set()
        self._requesters: list[int] = []
        self._fetches_final_models = self._said_final = False
        self._finished: set[int] = set()
        self._find_live_peers()

    def serve(self) -> Collective[ProtocolCounts]:
        """Take part on behalf of the rank throughout a generation.

        The caller must close the driver after this has returned, because a peer that is cut off
        from this rank may still be waiting for it.

        Raises:
            WireError: a message is corrupt, or its sender trains another model. No average was
                merged because of it.
        """
        now_s = yield Now()
        while True:
            yield from _send(self.take_outgoing())
            if self.done:
                return self.counts
            event: Callable[[float], None]
            try:
                event = partial(
                    self.receive, *(yield RecvAny(self.sources, self.time_left_s(now_s)))
                )
            except PeerTimeoutError:
                event = self.on_deadline
            except PeerError as error:
                if error.rank is None:
                    raise
                event = partial(self.mark_dead, error.rank)
            # One look at the clock for each event is enough: what follows it takes next to no time.
            now_s = yield Now()
            event(now_s)
            del event  # with a message that may be as large as the model

    @property
    def done(self) -> bool:
        """Whether this rank and all living peers have finished, and nothing is still due here."""
        return self._finished >= self.sources and not (
            self._asked & self.live_peers or self._is_busy()
        )

    @property
    def _is_final(self) -> bool:
        """Whether this rank's model changes no more: nobody opens another version, and what living
        peers have sent of earlier ones is here, because it was sent before they said so.
        """
        return self.counts.stopped >= self.sources and not self._is_busy()

    def take_outgoing(self) -> list[tuple[int, Payload]]:
        """The messages to send now, each with its receiver."""
        if self._is_final:
            if not self._said_final:
                self._said_final = True
                self._model.mark_final()
            if self._fetches_final_models:
                self._fetches_final_models = False
                self._ask_for_models(self.live_peers)
        # The sender of a request may have merged an average that this rank is about to merge.
        # Without it this model would lag behind, so the answer waits. One that has stopped asks for
        # the final model.
        answered = [
            requester
            for requester in self._requesters
            if (self._is_final if requester in self.counts.stopped else not self._is_average_due())
        ]
        if answered:
            model = self._message(
                MessageKind.MODEL_REPLY, self._checked(self._model.snapshot())
            ).to_bytes()
            self._outgoing += [(requester, model) for requester in answered]
            self._requesters = [each for each in self._requesters if each not in answered]
        taken, self._outgoing = self._outgoing, []
        return [(peer, message) for peer, message in taken if peer not in self.counts.dead]

    def receive(self, sender: int, payload: Payload, now_s: float) -> None:
        """Take in a message.

        Raises:
            WireError: the message is corrupt, or cannot come from `sender`.
        """
        message = ModelMessage.from_bytes(payload)
        if message.generation != self._settings.generation:
            return
        if (sender == self._rank) != (message.kind in _FROM_THIS_RANK):
            raise WireError(
                f"rank {sender} sent rank {self._rank} a message of kind {message.kind.name}, which"
                " it cannot"
            )
        self.counts.suspected.discard(sender)  # any message shows that the sender is there
        match message.kind:
            case MessageKind.STOP_STEPPING | MessageKind.STOPPED:
                self.counts.stopped.add(sender)
                if sender == self._rank:
                    self._tell(MessageKind.STOPPED, self.live_peers)
            case MessageKind.FINISH | MessageKind.FINISHED:
                self._finished.add(sender)
                self.counts.stopped.add(sender)
                if sender == self._rank:
                    self._tell(MessageKind.FINISHED, self.live_peers)
            case MessageKind.FETCH_MODEL:
                self._request_model(message.version)
            case MessageKind.MODEL_REQUEST:
                self._requesters.append(sender)
            case MessageKind.MODEL_REPLY:
                self._receive_model(sender, message)
            case _:
                self._receive_of_version(sender, message, now_s)
        self._advance(now_s)

    def mark_dead(self, rank: int, now_s: float) -> None:
        """The driver says that `rank` is dead."""
        self.counts.dead.add(rank)
        self._find_live_peers()
        self.counts.suspected.discard(rank)
        self._model.mark_dead(rank)
        self._forget_rank(rank)
        self._advance(now_s)

    def time_left_s(self, now_s: float) -> float | None:
        """The time until the earliest deadline; None where no peer is awaited with a deadline."""
        earliest_s = min(self._deadlines_s(), default=math.inf)
        return None if earliest_s == math.inf else max(0.0, earliest_s - now_s)

    @abstractmethod
    def _deadlines_s(self) -> Iterable[float]:
        """All deadlines; infinity is none."""

    @abstractmethod
    def on_deadline(self, now_s: float) -> None:
        """The earliest deadline has passed."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether some version is open, or a piece of a closed one may still arrive."""

    @abstractmethod
    def _is_average_due(self) -> bool:
        """Whether an average is about to arrive that peers may have merged already."""

    @abstractmethod
    def _receive_of_version(self, sender: int, message: ModelMessage, now_s: float) -> None:
        """Take in a message of a version. Raises `WireError`."""

    def _forget_rank(self, rank: int) -> None:  # noqa: B027 - `_advance` follows, which may do
        """Wait for nothing from `rank`, which is dead."""

    @abstractmethod
    def _advance(self, now_s: float) -> None:
        """After each event: let every version proceed as far as it can without waiting."""

    def _find_live_peers(self) -> None:
        self.sources = frozenset(self._settings.members) - self.counts.dead
        self.live_peers = self.sources - {self._rank}

    def _absent(self) -> set[int]:
        return self.counts.dead | self.counts.suspected

    def _contribution(self, version: int) -> Contribution | None:
        return self._checked(self._model.contribute(version))

    def _checked(self, mine: Contribution | None) -> Contribution | None:
        assert mine is None or mine.counters.size == self._settings.num_counters, (
            "ProtocolSettings.num_counters is not that of the model"
        )
        return mine

    def _tell(self, kind: MessageKind, peers: Set[int], *, version: int = -1) -> None:
        generation = self._settings.generation
        message = ModelMessage(kind=kind, generation=generation, version=version).to_bytes()
        self._outgoing += [(peer, message) for peer in sorted(peers)]

    def _request_model(self, peer: int) -> None:
        assert peer != self._rank, "a rank has its own model without a request"
        if peer < 0 and self._rank in self.counts.stopped:
            self._fetches_final_models = True
        else:
            self._ask_for_models(self.live_peers if peer < 0 else {peer})

    def _ask_for_models(self, peers: Set[int]) -> None:
        self._asked |= peers
        self._tell(MessageKind.MODEL_REQUEST, peers)

    def _message(
        self, kind: MessageKind, mine: Contribution | None, *, version: int = -1
    ) -> ModelMessage:
        """A message with the whole model, or without one."""
        generation, num_elements = self._settings.generation, self._settings.num_elements
        empty = ModelMessage(
            kind=kind, generation=generation, version=version, num_elements=num_elements
        )
        if mine is None:
            return empty
        return replace(
            empty,
            step=mine.step,
            fresh=mine.fresh,
            weight=mine.weight,
            counters=mine.counters,
            values=mine.values,
        )

    def _receive_model(self, sender: int, message: ModelMessage) -> None:
        self._asked.discard(sender)
        has_values = message.weight > 0
        check_values(sender, message, self._settings, has_values=has_values)
        model = Contribution(
            values=message.values,
            step=message.step,
            fresh=message.fresh,
            weight=message.weight,
            counters=message.counters,
        )
        self._model.receive_model(sender, model if has_values else None)


def _send(messages: Sequence[tuple[int, Payload]]) -> Collective[None]:
    """Apart, so that no message, which may be as large as the model, is held any longer."""
    for peer, message in messages:
        yield Send(peer, message)
