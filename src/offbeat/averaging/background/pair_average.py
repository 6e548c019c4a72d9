"""Averages of two at any time, the protocol of AD-PSGD (arXiv 1710.06952, algorithm 1): nobody
waits for who computes.

    a rank arrives at its version t:  it sends its model to a partner
    a model reaches a rank:           it averages it with its own as that is now, takes that in, and
    sends the average back
    an average reaches a rank:        it takes that in

It has the face of `group_average` and the same posts. Versions are each rank's own: `Meeting.group`
is this rank and its partner, who need not know of it, or this rank alone; `Meeting.min_fresh` says
nothing. What a rank averages because it was asked has no version: `Replica.contribute` and `close`
get -1, -2, -3, ... for these, never a number twice, each closed before anything else happens.
Averages are to be taken in by `merge_delta`: a rank that waits for its partner may have been
averaged with others meanwhile.

Differences from the paper:
- its average is atomic: both models are locked until both hold it, which needs a bipartite graph,
  or ranks that ask each other wait for ever. Here the asked one never waits, and who asked adds
  what it did since to the average that comes back (average + now - then). The mean over ranks is
  the same, and any two may be partners. Two that ask each other at once would so swap their models
  and come no nearer: the lower rank declines, and one average serves both.
- averages carry weights, and partners may be slow, stop or die. A partner that does not answer
  within a deadline is suspected: its answer is merged when it comes, and it is not asked again
  until it is heard of.

Bytes a rank and version, for models of N bytes: N asking and N for each time it is asked; 80 bytes
a message and 48 an answer on top, and 8 a counter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from offbeat.averaging.background.deadlines import deadline_s
from offbeat.averaging.background.group_base import (
    Contribution,
    Happenings,
    Outcome,
    Piece,
    Replica,
    Terms,
    check_model,
)
from offbeat.averaging.background.round_member import Member, attend
from offbeat.averaging.background.rounds import largest_of, mean_of
from offbeat.codec.model_wire import ABSENT, Kind, ModelMessage
from offbeat.errors import WireError
from offbeat.transport.operations import Collective


def serve(
    rank: int, terms: Terms, replica: Replica, happenings: Happenings | None = None
) -> Collective[Happenings]:
    """As `group_average.serve`. Versions at which a rank arrives are 0 or more and grow."""
    return attend(PairMember(rank, terms, replica, happenings or Happenings()))


@dataclass(kw_only=True, slots=True)
class _Request:
    """A model that was sent to a partner who has not answered."""

    partner: int
    mine: Contribution
    opened_s: float
    deadline_s: float
    closed: bool = False


class PairMember(Member):
    """Asks partners, and answers those whose partner this rank is."""

    def __init__(self, rank: int, terms: Terms, replica: Replica, happenings: Happenings) -> None:
        super().__init__(rank, terms, replica, happenings)
        self._requests: dict[int, _Request] = {}
        self._newest = -1
        self._num_answers = 0
        self._waits_s: deque[float] = deque(maxlen=terms.patience.window)

    def time_left_s(self, now_s: float) -> float | None:
        earliest_s = min(
            (request.deadline_s for request in self._requests.values()), default=math.inf
        )
        return None if earliest_s == math.inf else max(0.0, earliest_s - now_s)

    def lose_patience(self, now_s: float) -> None:
        late = min(self._requests.values(), key=lambda request: request.deadline_s)
        self.happenings.suspected.add(late.partner)
        self.happenings.suspicions += 1
        self._go_on(now_s)

    def _is_busy(self) -> bool:
        return bool(self._requests)

    def _is_settling(self) -> bool:
        return any(not request.closed for request in self._requests.values())

    def _take(self, sender: int, message: ModelMessage, now_s: float) -> None:
        match message.kind:
            case Kind.ARRIVE:
                self._arrive(message.version, now_s)
            case Kind.PART:
                self._answer(sender, message, now_s)
            case _:
                self._take_answer(sender, message, now_s)

    def _do_without(self, rank: int) -> None:
        """Nothing: whoever is dead is absent."""

    def _go_on(self, now_s: float) -> None:
        absent = self._absent()
        for version, request in list(self._requests.items()):
            if request.partner in absent and not request.closed:
                request.mine = replace(request.mine, values=request.mine.values.copy())
                request.closed, request.deadline_s = True, math.inf
                self._close(version, (self._rank, request.partner), request.opened_s, now_s)
            if request.partner in self.happenings.dead:
                del self._requests[version]
                self._replica.settle(version)

    def _arrive(self, version: int, now_s: float) -> None:
        if version <= self._newest:
            return
        self._newest = version
        self.happenings.arrivals += 1
        group = self._terms.meeting(version).group
        assert len(group) <= 2, "a pair has two members"
        mine = self._contribution(version)
        partner = next((rank for rank in group if rank != self._rank), None)
        if partner is None or partner in self._absent() or mine is None:
            self._close(version, group, now_s, now_s)
            self._replica.settle(version)
            return
        self._outgoing.append((partner, self._message(Kind.PART, mine, version=version).to_bytes()))
        self._requests[version] = _Request(
            partner=partner,
            mine=mine,
            opened_s=now_s,
            deadline_s=now_s + deadline_s(self._waits_s, self._terms.patience),
        )

    def _answer(self, sender: int, theirs: ModelMessage, now_s: float) -> None:
        check_model(sender, theirs, self._terms, 0, self._terms.num_elements, has_values=True)
        answer = replace(
            self._message(Kind.AVERAGE, None, version=theirs.version), notes=(ABSENT, ABSENT)
        )
        if sender > self._rank and any(
            request.partner == sender for request in self._requests.values()
        ):
            self._outgoing.append((sender, answer.to_bytes()))
            return
        self._num_answers += 1
        self.happenings.answers += 1
        mine = self._contribution(-self._num_answers)
        pieces: list[Piece] = []
        if mine is not None:
            both = [theirs, self._message(Kind.PART, mine)]
            answer = replace(
                answer,
                notes=tuple(part.note for part in both),
                counters=largest_of(both),
                values=mean_of(both),
            )
            pieces.append(_piece(answer, mine))
        self._outgoing.append((sender, answer.to_bytes()))
        self._close(-self._num_answers, (sender, self._rank), now_s, now_s, *pieces)
        self._replica.settle(-self._num_answers)

    def _take_answer(self, sender: int, answer: ModelMessage, now_s: float) -> None:
        request = self._requests.get(answer.version)
        if request is None or request.partner != sender or len(answer.notes) != 2:
            raise WireError(
                f"rank {sender} sent rank {self._rank} an average of {len(answer.notes)} for"
                f" version {answer.version}, which it was not asked for; do all ranks have the same"
                " options?"
            )
        is_in = answer.notes[0].weight > 0
        check_model(sender, answer, self._terms, 0, self._terms.num_elements, has_values=is_in)
        del self._requests[answer.version]
        self._waits_s.append(now_s - request.opened_s)
        pieces = [_piece(answer, request.mine)] if is_in else []
        if request.closed:
            self.happenings.late_averages += 1
            for piece in pieces:
                self._replica.amend(answer.version, piece)
        else:
            self._close(answer.version, (self._rank, sender), request.opened_s, now_s, *pieces)
        self._replica.settle(answer.version)

    def _close(
        self, version: int, group: tuple[int, ...], opened_s: float, closed_s: float, *pieces: Piece
    ) -> None:
        self._replica.close(
            Outcome(
                version=version, group=group, pieces=pieces, opened_s=opened_s, closed_s=closed_s
            )
        )


def _piece(average: ModelMessage, mine: Contribution) -> Piece:
    return Piece(
        begin=0,
        average=average.values,
        notes=average.notes,
        contributed=mine.values,
        fresh=mine.fresh,
        counters=average.counters,
    )
