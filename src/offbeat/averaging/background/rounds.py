"""One version of a group average at one member: what it sent, what it has, what it waits for.

There are two ways to average. With both, all members that get an average get the same bits.

- `DirectRound`: every member sends its model to every other one and adds up all models in the order
  of the group. That is one message a peer and (S-1) N bytes, for a group of S and a model of N.
  Either all of the participants have the average or none has. Participants average among themselves
  only when each of them knows that all of them mean to average among exactly these participants,
  and when these are more than half of the group.
- `ScatteredRound`: a reduce-scatter and an all-gather. The model is cut into as many regions as
  there are members, and each member owns one. Every member sends its chunk of a region to the
  owner. The owner averages the chunks that it has and sends the average to all. That is two
  messages a peer and 2 N (S-1) / S bytes. A missing owner costs its region only; a missing
  contribution is not in that owner's average.

Contributions may travel rounded to bfloat16 (`ProtocolSettings.rounding`), or as coded differences
from the last global synchronization (`ProtocolSettings.changes`). A member then moves its model by
the average less what it contributed, as decoded, and keeps what rounding took. In a
`ScatteredRound` the average is rounded once more on its way back; what that takes from all members
together the owner adds to its own model. So the weighted sum over members stays what it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolSettings,
    ReadInParts,
    check_values,
)
from offbeat.codec.model_wire import (
    ABSENT,
    Codes,
    Counters,
    MessageKind,
    ModelMessage,
    Values,
    no_codes,
    no_counters,
)
from offbeat.codec.rounding import Rounding, add_rounded, make_up_for_rounding
from offbeat.collectives.weighted_mean import regions_of
from offbeat.errors import WireError
from offbeat.transport.operations import Payload

Outgoing: TypeAlias = list[tuple[int, Payload]]
"""Messages to send, each with its receiver. A round keeps of a contribution what it sends of it, in
the same memory: the values that it was made of may change afterwards.
"""


class GroupRound(ABC):
    """One version at one member. It uses no clock and no network; `group_average` adds both.

    Attributes:
        version: the number of the version.
        group: the ranks of its group.
        contributed: whether this rank has contributed, or has decided to stay out.
        over: whether this rank is done with the version, except for pieces that may arrive late.
    """

    def __init__(
        self, version: int, group: tuple[int, ...], *, rank: int, settings: ProtocolSettings
    ) -> None:
        self.version = version
        self.group = group
        self.contributed = False
        self.over = False
        self._rank = rank
        self._settings = settings
        self._num_elements = settings.num_elements
        self._chunks: dict[int, ModelMessage] = {}
        self._new_pieces: list[Piece] = []
        self._fresh = False
        self._arrived = False
        self._changes = settings.changes_in(version)
        self._moves_anchor = settings.changes is not None and self._changes is None
        self._rounding = None if self._changes is not None else settings.rounding
        if self._is_alone:
            self._changes = self._rounding = None

    def must_contribute(self, min_arrivals: int, absent: Set[int], announced: Set[int]) -> bool:
        """Whether all members must contribute now.

        This is so when `min_arrivals` members have arrived, when all that are not absent have, or
        when some member that has not arrived has contributed, which shows that it knew so.

        Args:
            min_arrivals: how many arrivals the version waits for, >= 1.
            absent: the ranks that will not arrive.
            announced: the ranks that have announced their arrival, although their chunks may still
                be on the way.
        """
        arrived = announced | {rank for rank, chunk in self._chunks.items() if chunk.arrived}
        return (
            len(arrived) >= min_arrivals
            or arrived | absent >= set(self.group)
            or not self._chunks.keys() <= arrived
        )

    def take_pieces(self) -> list[Piece]:
        """The averages that have arrived since the last call."""
        taken, self._new_pieces = self._new_pieces, []
        return taken

    @abstractmethod
    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        """Take part in the version, or stay out of it. Returns the messages to send.

        Args:
            mine: this rank's contribution; None to stay out.
            absent: the ranks that are sent no values.
            arrived: whether this rank has arrived at this version or a later one.
        """

    @abstractmethod
    def receive(self, sender: int, message: ModelMessage) -> None:
        """Take in a chunk or an average of this version, unless it came too late to count.

        Raises:
            WireError: the message does not fit this version.
        """

    @abstractmethod
    def awaited(self) -> Set[int]:
        """The ranks whose messages this round waits for, once this rank has contributed."""

    @abstractmethod
    def proceed_without(self, absent: Set[int]) -> Outgoing:
        """Continue although the messages of `absent` are missing. No other message may be awaited.
        Returns the messages to send.
        """

    @abstractmethod
    def late_senders(self) -> Set[int]:
        """The ranks whose messages may still bring a piece with this rank's contribution, after
        the round is over.
        """

    @abstractmethod
    def mark_dead(self, rank: int) -> None:
        """No more messages of `rank` will arrive."""

    def _make_chunk(
        self, mine: Contribution | None, part: slice, *, withheld: bool, participants: int = 0
    ) -> ModelMessage:
        given = None if withheld else mine
        chunk = ModelMessage(
            kind=MessageKind.CHUNK,
            generation=self._settings.generation,
            version=self.version,
            step=-1 if mine is None else mine.step,
            fresh=mine is not None and mine.fresh,
            arrived=self._arrived,
            participants=participants,
            num_elements=self._num_elements,
            begin=part.start,
        )
        if given is None:
            return chunk
        chunk = replace(chunk, weight=given.weight, counters=given.counters)
        values, codes = given.values[part], no_codes()
        if self._changes is not None:
            anchor = None if given.anchor is None else given.anchor[part]
            return self._coded(chunk, values, anchor)
        if self._rounding is not None:
            codes, values = self._rounding.encode(values, part.start)
        return replace(chunk, values=values, codes=codes)

    @property
    def _is_alone(self) -> bool:
        """Whether nobody is sent what this rank contributes: it averages with itself at once."""
        return len(self.group) == 1

    def _sent(self, chunk: ModelMessage) -> tuple[Payload, ModelMessage]:
        """`chunk` as it travels, and what was contributed by it, which is in the same memory."""
        if self._is_alone:
            return b"", chunk
        content = chunk.to_bytes()
        return content, self._decoded(ModelMessage.from_bytes(content))

    def _coded(self, message: ModelMessage, values: Values, anchor: Values | None) -> ModelMessage:
        """`message` with the differences of `values` from `anchor`."""
        if self._changes is None or not values.size:
            return replace(message, values=values)
        coded, exact = self._changes.encode(values, anchor, message.begin)
        return replace(
            message,
            values=exact,
            coded=coded,
            num_coded=values.size,
            bits=self._changes.values.bits,
        )

    def _decoded(self, message: ModelMessage) -> ModelMessage:
        """`message` with its differences as values, if it has any."""
        if self._changes is None or not message.bits:
            return message
        values = self._changes.decode(
            message.coded, message.values, message.num_coded, message.begin
        )
        return replace(message, values=values, coded=message.coded[:0], num_coded=0, bits=0)

    def _whole(self, message: ModelMessage) -> Values:
        """All elements of `message`, as they travelled."""
        if message.codes.size and self._rounding is not None:
            return self._rounding.decode((message.codes, message.values), message.begin)
        return message.values


class DirectRound(GroupRound):
    """Every member sends its whole model to every other member."""

    _participants: frozenset[int] = frozenset()
    _decided = False

    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        self.contributed = True
        self._arrived = arrived
        self._fresh = mine is not None and mine.fresh
        self._participants = frozenset(self.group) - absent
        mask = sum(
            1 << position for position, rank in enumerate(self.group) if rank in self._participants
        )
        whole = slice(0, self._num_elements)
        chunk = self._make_chunk(mine, whole, withheld=False, participants=mask)
        content, self._chunks[self._rank] = self._sent(chunk)
        withheld = self._make_chunk(mine, whole, withheld=True, participants=mask).to_bytes()
        self._decide()
        return [
            (peer, withheld if peer in absent else content)
            for peer in self.group
            if peer != self._rank
        ]

    def receive(self, sender: int, message: ModelMessage) -> None:
        if message.kind != MessageKind.CHUNK:
            raise WireError(
                f"rank {sender} sent an average of version {self.version}, whose members exchange"
                " without owners"
            )
        check_values(sender, message, self._settings, has_values=message.weight > 0)
        self._chunks.setdefault(sender, self._decoded(message))
        if self.contributed:
            self._decide()

    def awaited(self) -> Set[int]:
        return self._participants - self._chunks.keys()

    def proceed_without(self, absent: Set[int]) -> Outgoing:
        # Peers may still send their chunks, and may have averaged already. So this only ends
        # the wait: the average is merged when the missing chunks arrive.
        self.over = True
        return []

    def late_senders(self) -> Set[int]:
        return set() if self._decided else self.awaited()

    def mark_dead(self, rank: int) -> None:
        if self.contributed and rank in self.awaited():
            self._decide(failed=True)

    def _decide(self, *, failed: bool = False) -> None:
        """Average if all participants' chunks are here; give up if they never will agree."""
        if self._decided:
            return
        here = [
            self._chunks[rank]
            for rank in self.group
            if rank in self._participants and rank in self._chunks
        ]
        mask = self._chunks[self._rank].participants
        # Every participant must average the same chunks. That is certain only if all of them named
        # the same participants; and two disjoint sets of participants must not both average.
        failed = (
            failed
            or any(chunk.participants != mask for chunk in here)
            or 2 * len(self._participants) <= len(self.group)
        )
        if not failed and len(here) < len(self._participants):
            return
        self._decided = self.over = True
        if not failed and any(chunk.weight for chunk in here):
            own, rounding = self._chunks[self._rank], self._rounding
            average = ReadInParts(
                self._num_elements,
                lambda span: mean_of([_cut(chunk, span, rounding) for chunk in here], rounding),
            )
            contributed = ReadInParts(
                self._num_elements, lambda span: self._whole(_cut(own, span, rounding))
            )
            self._new_pieces.append(
                Piece(
                    begin=0,
                    average=average,
                    notes=tuple(
                        self._chunks[rank].note if rank in self._participants else ABSENT
                        for rank in self.group
                    ),
                    contributed=contributed if own.weight else None,
                    fresh=self._fresh,
                    counters=largest_of(here),
                    of_changes=self._changes is not None,
                    anchor=average if self._moves_anchor else None,
                )
            )
        # The chunks are still needed to tell which members have sent one, but their values are not.
        self._chunks = {
            rank: replace(chunk, values=np.empty(0, chunk.values.dtype), codes=no_codes())
            for rank, chunk in self._chunks.items()
        }


class ScatteredRound(GroupRound):
    """A reduce-scatter and an all-gather, with an owner for each region of the model."""

    def __init__(
        self, version: int, group: tuple[int, ...], *, rank: int, settings: ProtocolSettings
    ) -> None:
        super().__init__(version, group, rank=rank, settings=settings)
        parts = regions_of(0, self._num_elements, len(group))
        self._regions = dict(zip(group, parts, strict=True))
        self._contributed_to: dict[int, ModelMessage] = {}
        self._averages: set[int] = set()

    def must_contribute(self, min_arrivals: int, absent: Set[int], announced: Set[int]) -> bool:
        # An owner averages only after all had to contribute.
        return bool(self._averages) or super().must_contribute(min_arrivals, absent, announced)

    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        self.contributed = True
        self._arrived = arrived
        self._fresh = mine is not None and mine.fresh
        outgoing = []
        for owner in self.group:
            if owner in self._averages:
                continue  # the owner has averaged its region without this rank
            content, chunk = self._sent(
                self._make_chunk(mine, self._regions[owner], withheld=owner in absent)
            )
            if chunk.weight:
                self._contributed_to[owner] = chunk
            if owner == self._rank:
                self._chunks[owner] = chunk
            else:
                outgoing.append((owner, content))
        return outgoing

    def receive(self, sender: int, message: ModelMessage) -> None:
        if message.kind == MessageKind.AVERAGE:
            self._receive_average(sender, message)
            return
        region, has_values = self._regions[self._rank], message.weight > 0
        check_values(sender, message, self._settings, region, has_values=has_values)
        if self._rank not in self._averages:
            self._chunks.setdefault(sender, self._decoded(message))

    def awaited(self) -> Set[int]:
        # First the chunks of this rank's own region, then the averages of all regions.
        here = self._averages if self._rank in self._averages else self._chunks.keys()
        return set(self.group) - here

    def proceed_without(self, absent: Set[int]) -> Outgoing:
        if self._rank in self._averages:
            self.over = True
            return []
        chunks = self._chunks
        in_order = [chunks[rank] for rank in self.group if rank in chunks]
        withheld = ModelMessage(
            kind=MessageKind.AVERAGE,
            generation=self._settings.generation,
            version=self.version,
            num_elements=self._num_elements,
            begin=self._regions[self._rank].start,
            values=np.empty(0, self._settings.dtype),
            notes=(ABSENT,) * len(self.group),
        )
        average = replace(
            withheld,
            counters=largest_of(in_order),
            values=mean_of(in_order, self._rounding),
            notes=tuple(chunks[rank].note if rank in chunks else ABSENT for rank in self.group),
        )
        average, own = self._rounded(average)
        self._receive_average(self._rank, own, sent=average)
        content, without_values = average.to_bytes(), withheld.to_bytes()
        # An absent rank whose contribution is in the average needs it, or the mean over ranks would
        # change when it wakes. Any other absent rank is spared the values.
        spared = {rank for rank in absent if rank not in chunks or not chunks[rank].weight}
        self._chunks = {}
        return [
            (rank, without_values if rank in spared else content)
            for rank in self.group
            if rank != self._rank
        ]

    def late_senders(self) -> Set[int]:
        return self._contributed_to.keys() - self._averages

    def mark_dead(self, rank: int) -> None:
        self._contributed_to.pop(rank, None)

    def _rounded(self, average: ModelMessage) -> tuple[ModelMessage, ModelMessage]:
        """What the other members get of the average of this rank's region, and what it has itself.

        Where values are rounded, it makes up for what rounding takes from all of them. A rank that
        is not in the average cannot, and so rounds nothing.
        """
        mine = self._contributed_to.get(self._rank)
        if mine is None or not average.values.size:
            return average, average
        if self._changes is not None:
            coded = self._coded(average, average.values, None)
            sent = self._decoded(coded).values  # where there is no difference, it is exact
            own = sent + share_of(average, mine.weight) * (average.values - sent)
            own.flags.writeable = False
            return coded, replace(average, values=own)
        if self._rounding is None:
            return average, average
        return rounded_average(average, self._rounding, mine.weight)

    def _receive_average(
        self, owner: int, message: ModelMessage, *, sent: ModelMessage | None = None
    ) -> None:
        """Take in an average; `sent`: what the other members get of this rank's own."""
        region, has_values = self._regions[owner], any(note.weight for note in message.notes)
        check_values(owner, message, self._settings, region, has_values=has_values)
        if len(message.notes) != len(self.group):
            raise WireError(
                f"rank {owner} averaged among {len(message.notes)} members, the group has"
                f" {len(self.group)}"
            )
        if owner in self._averages:
            return
        self._averages.add(owner)
        message = self._decoded(message)
        mine = self._contributed_to.get(owner)
        # The note tells whether the owner had this rank's chunk in time.
        is_in = mine is not None and message.notes[self.group.index(self._rank)].weight > 0
        if message.size:
            piece = self._piece(message, mine if is_in else None)
            if self._moves_anchor:
                piece = replace(piece, anchor=self._whole(sent or message))
            self._new_pieces.append(piece)
        self.over = self.over or self._averages.issuperset(self.group)

    def _piece(self, average: ModelMessage, mine: ModelMessage | None) -> Piece:
        """A piece of `average`; `mine`: what this rank contributed to it."""
        codes: tuple[Codes, Codes] | None = None
        contributed: Values | None
        if mine is not None and average.codes.size:
            codes = average.codes, mine.codes
            values, contributed = average.values, mine.values
        else:
            values = self._whole(average)
            contributed = None if mine is None else self._whole(mine)
        return Piece(
            begin=average.begin,
            average=values,
            notes=average.notes,
            contributed=contributed,
            fresh=mine is not None and self._fresh,
            counters=average.counters,
            codes=codes,
            of_changes=self._changes is not None,
        )


def _cut(chunk: ModelMessage, span: slice, rounding: Rounding | None) -> ModelMessage:
    """What `chunk`, of a whole model, says of the elements `span`."""
    if rounding is None or not chunk.codes.size:
        return replace(chunk, begin=span.start, values=chunk.values[span])
    before = rounding.num_exact(0, span.start)
    exact = slice(before, before + rounding.num_exact(span.start, span.stop))
    return replace(chunk, begin=span.start, codes=chunk.codes[span], values=chunk.values[exact])


def share_of(average: ModelMessage, weight: float) -> np.floating:
    """How many times what rounding takes from each member the one of `weight` makes up for."""
    share: np.floating = average.values.dtype.type(
        sum(note.weight for note in average.notes) / weight
    )
    return share


def rounded_average(
    average: ModelMessage, rounding: Rounding, weight: float
) -> tuple[ModelMessage, ModelMessage]:
    """What is sent of `average`, and what the member of `weight` that has made it has itself."""
    codes, exact = rounding.encode(average.values, average.begin)
    own = np.empty_like(average.values)
    make_up_for_rounding(average.values, codes, share_of(average, weight), own)
    rounding.put_exact_(own, exact, average.begin)
    own.flags.writeable = False
    return replace(average, values=exact, codes=codes), replace(average, values=own)


def mean_of(chunks: Sequence[ModelMessage], rounding: Rounding | None = None) -> Values:
    """The weighted mean of `chunks`, added up in this order; read-only. It is empty when all were
    withheld.

    Args:
        chunks: of the same range.
        rounding: how they were rounded; None: they were not.
    """
    weighted = [chunk for chunk in chunks if chunk.weight]
    if not weighted:
        return np.empty(0, np.float32)
    # Where values were rounded these are the others, of which there may be none.
    total = weighted[0].values * weighted[0].weight
    for chunk in weighted[1:]:
        total += chunk.values if chunk.weight == 1 else chunk.values * chunk.weight
    sum_of_weights = sum(chunk.weight for chunk in weighted)
    total /= sum_of_weights
    if rounding is not None:
        exact, total = total, np.zeros(weighted[0].size, total.dtype)
        for chunk in weighted:
            add_rounded(total, chunk.codes, total.dtype.type(chunk.weight))
        total /= sum_of_weights
        rounding.put_exact_(total, exact, weighted[0].begin)
    total.flags.writeable = False
    return total


def largest_of(chunks: Sequence[ModelMessage]) -> Counters:
    """The largest value of each counter; read-only. It is empty when all chunks were withheld."""
    largest = no_counters()
    for chunk in chunks:
        if chunk.weight:
            largest = np.maximum(largest, chunk.counters) if largest.size else chunk.counters.copy()
    largest.flags.writeable = False
    return largest
