"""AD-PSGD: each rank averages its weights with one random peer at a time, asynchronously (arXiv
1710.06952).

    on each rank i, after each step:  choose a random j; atomically x_i, x_j = (x_i + x_j)/2 each
    meanwhile:                        g = gradient; x_i = x_i - gamma g, for the current x_i

No rank waits for one that computes. What happens at a rank:

    its trainer arrives at version t:    it sends its model to a partner
    the model of a peer arrives:         it averages that with its own current model, merges the
                                         average, and sends it back
    the average comes back:              it merges it

The trainer takes the averages that have come at the end of its step, and an answer that has not
come by then is merged later.

Cost per step: each rank sends on average 2 n elements for n weights: n to ask a partner, and n to
answer a peer; 80 bytes a message, 48 an answer, and 8 a counter.

Differences from the paper:
- The average of the paper is atomic: both models are locked until both have the average. That needs
  a bipartite graph, or ranks that ask each other wait for ever. Here the rank that is asked never
  waits, and the rank that asked adds what it did since to the average that comes back (average +
  now - then). The mean over ranks is the same, and any two ranks may be partners. Two ranks that
  ask each other at once would only exchange their models: therefore the lower rank declines, and
  one average serves both.
- Averages have weights, and partners may be slow, stop or die. A partner that does not answer
  within a deadline is suspected: its answer is merged when it arrives, and it is not asked again
  until a message of it arrives.
- Values may travel in bfloat16 (`ProtocolSettings.rounding`): each of the two moves by the average
  less what it contributed, as rounded. What rounding the average takes from both, the one that made
  it adds to its own model.
- Floating-point buffers take plain means, integer ones stay local. A rank whose gradient is not
  finite skips its own step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.averager import BackgroundWeightAverage, delta_merge
from offbeat.averaging.background.deadlines import deadline_s
from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolSettings,
    VersionResult,
    check_values,
)
from offbeat.averaging.background.protocol_member import ProtocolMember
from offbeat.averaging.background.rounds import largest_of, mean_of, rounded_average
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.model_wire import ABSENT, MessageKind, ModelMessage, Values
from offbeat.codec.rounding import Rounding
from offbeat.errors import WireError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.weights.model_weights import ModelWeights, Staging


@dataclass(frozen=True, kw_only=True)
class ADPSGD(AveragingStrategy):
    """Weights averaged with one random worker after every step, asynchronously.

    Args:
        values: how weights travel: "float32" (float64 where the model has such), or "bfloat16" for
            half the bytes, whose rounding stays in the worker's own model.
    """

    survives_death = True
    trains_islands = True

    values: Literal["float32", "bfloat16"] = "float32"

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        staging = Staging(weights.tensors(), in_miniature=True)
        statistics = tuple(staging.spans(weights.positions_of_statistics()))
        model = SharedModel(
            delta_merge(staging, weights), one_at_a_time=False, changed=context.driver.condition()
        )
        return [
            BackgroundWeightAverage(
                context,
                weights,
                model,
                staging=staging,
                member=PairMember,
                group_of=self.group_of,
                rounding=Rounding(statistics) if self.values == "bfloat16" else None,
                overlap=True,
            )
        ]

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        """The group of the member at `position` in `version`."""
        if num_members == 1:
            return VersionGroup(ranks=(position,))
        # One draw of a generator of its own for each version, so that the choice depends on
        # nothing else.
        draw = int(np.random.default_rng([position, version]).integers(num_members - 1))
        return VersionGroup(ranks=(position, draw + (draw >= position)))


@dataclass(kw_only=True, slots=True)
class _Request:
    """A model that was sent to a partner whose answer has not arrived.

    Attributes:
        closed: whether the version was closed without the answer.
        sent: what it says of this rank's model, in the memory of the message.
    """

    partner: int
    sent: ModelMessage
    opened_s: float
    deadline_s: float
    closed: bool = False


class PairMember(ProtocolMember):
    """Sends this rank's model to partners, and answers peers that have chosen this rank.

    Versions are each rank's own, 0 or more, and grow. `VersionGroup.ranks` is this rank and its
    partner, who need not know of it, or this rank alone; `min_arrivals` is not used. An average
    that a peer asked for has no version of this rank: `SharedModel.contribute` and `close` get -1,
    -2, -3, ... for these. No number is used twice, and each such version is closed before anything
    else happens. Averages must be merged by `merge_delta`, because a rank that waits for its
    partner may have averaged with peers meanwhile.
    """

    def __init__(self, rank: int, settings: ProtocolSettings, model: SharedModel) -> None:
        super().__init__(rank, settings, model)
        self._requests: dict[int, _Request] = {}
        self._newest = -1
        self._num_answers = 0
        self._waits_s: deque[float] = deque(maxlen=settings.reply_deadline.window)

    def _ask_partner(self, version: int, now_s: float) -> None:
        """The trainer has arrived at `version`: send the model to the partner of that version."""
        if version <= self._newest:
            return
        self._newest = version
        pair = self._settings.group_of(version).ranks
        assert len(pair) <= 2, "a pair has two members"
        mine = self._contribution(version)
        partner = next((rank for rank in pair if rank != self._rank), None)
        if partner is None or partner in self._absent() or mine is None:
            self._close(version, pair)
            self._model.finalize_version(version)
            return
        content = self._chunk(mine, version=version).to_bytes()
        self._outgoing.append((partner, content))
        self._requests[version] = _Request(
            partner=partner,
            sent=ModelMessage.from_bytes(content),
            opened_s=now_s,
            deadline_s=now_s + deadline_s(self._waits_s, self._settings.reply_deadline),
        )

    def _answer(self, sender: int, theirs: ModelMessage) -> None:
        """A peer's model has arrived: average it with this rank's, and send the average back."""
        check_values(sender, theirs, self._settings, has_values=True)
        answer = replace(
            self._message(MessageKind.AVERAGE, None, version=theirs.version), notes=(ABSENT, ABSENT)
        )
        # Both have asked each other. If both averaged, they would only exchange their models. The
        # higher rank's answer to this rank's own request brings the average.
        if sender > self._rank and any(
            request.partner == sender for request in self._requests.values()
        ):
            self._outgoing.append((sender, answer.to_bytes()))
            return
        self._num_answers += 1
        mine = self._contribution(-self._num_answers)
        pieces: list[Piece] = []
        if mine is not None:
            both, rounding = [theirs, self._chunk(mine)], self._settings.rounding
            answer = own = replace(
                answer,
                notes=tuple(chunk.note for chunk in both),
                counters=largest_of(both),
                values=mean_of(both, rounding),
            )
            contributed = mine.values
            if rounding is not None:
                answer, own = rounded_average(answer, rounding, mine.weight)
                contributed = rounding.decode((both[1].codes, both[1].values), 0)
            pieces.append(_piece(own, contributed, fresh=mine.fresh))
        self._outgoing.append((sender, answer.to_bytes()))
        self._close(-self._num_answers, (sender, self._rank), *pieces)
        self._model.finalize_version(-self._num_answers)

    def _receive_answer(self, sender: int, answer: ModelMessage, now_s: float) -> None:
        """The average that this rank asked for has come back."""
        request = self._requests.get(answer.version)
        if request is None or request.partner != sender or len(answer.notes) != 2:
            raise WireError(
                f"rank {sender} sent rank {self._rank} an average of {len(answer.notes)} for"
                f" version {answer.version}, which it was not asked for; do all ranks have the same"
                " options?"
            )
        is_in = answer.notes[0].weight > 0
        check_values(sender, answer, self._settings, has_values=is_in)
        del self._requests[answer.version]
        self._waits_s.append(now_s - request.opened_s)
        pieces, sent = [], request.sent
        if is_in:
            codes = (answer.codes, sent.codes) if answer.codes.size else None
            pieces = [replace(_piece(answer, sent.values, fresh=sent.fresh), codes=codes)]
        if request.closed:
            for piece in pieces:
                self._model.merge_late(answer.version, piece)
        else:
            self._close(answer.version, (self._rank, sender), *pieces)
        self._model.finalize_version(answer.version)

    def _advance(self, now_s: float) -> None:
        """Close the versions whose partner is dead or suspected."""
        absent = self._absent()
        for version, request in list(self._requests.items()):
            if request.partner in absent and not request.closed:
                # The answer of a suspected partner may still arrive.
                request.closed, request.deadline_s = True, math.inf
                self._close(version, (self._rank, request.partner))
            if request.partner in self.counts.dead:
                del self._requests[version]
                self._model.finalize_version(version)

    def _receive_of_version(self, sender: int, message: ModelMessage, now_s: float) -> None:
        match message.kind:
            case MessageKind.ARRIVE:
                self._ask_partner(message.version, now_s)
            case MessageKind.CHUNK:
                self._answer(sender, message)
            case _:
                self._receive_answer(sender, message, now_s)

    def _deadlines_s(self) -> Iterable[float]:
        return (request.deadline_s for request in self._requests.values())

    def on_deadline(self, now_s: float) -> None:
        late = min(self._requests.values(), key=lambda request: request.deadline_s)
        self.counts.suspected.add(late.partner)
        self.counts.suspicions += 1
        self._advance(now_s)

    def _is_busy(self) -> bool:
        return bool(self._requests)

    def _is_average_due(self) -> bool:
        return any(not request.closed for request in self._requests.values())

    def _chunk(self, mine: Contribution, *, version: int = -1) -> ModelMessage:
        """What travels of `mine`, at full precision or rounded."""
        chunk = self._message(MessageKind.CHUNK, mine, version=version)
        if (rounding := self._settings.rounding) is None:
            return chunk
        codes, exact = rounding.encode(mine.values, 0)
        return replace(chunk, values=exact, codes=codes)

    def _close(self, version: int, group: tuple[int, ...], *pieces: Piece) -> None:
        self._model.close_version(VersionResult(version=version, group=group, pieces=pieces))


def _piece(average: ModelMessage, contributed: Values, *, fresh: bool) -> Piece:
    return Piece(
        begin=0,
        average=average.values,
        notes=average.notes,
        contributed=contributed,
        fresh=fresh,
        counters=average.counters,
    )
