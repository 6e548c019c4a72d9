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

Contributions may travel rounded to bfloat16 (`ProtocolSettings.rounding`). A member then moves its
model by the average less what it contributed, as rounded, and keeps what rounding took. In a
`ScatteredRound` the average is rounded once more on its way back; what that takes from all members
together the owner adds to its own model. So the weighted sum over members stays what it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from offbeat.averaging.background.interface import Contribution, Piece, ProtocolSettings
from offbeat.codec.model_wire import (
    Counters,
    MessageKind,
    ModelMessage,
    Values,
    no_codes,
    no_counters,
)
from offbeat.codec.rounding import Rounding, add_rounded

Outgoing: TypeAlias = list[tuple[int, bytes]]
"""Messages to send, each with its receiver. They hold copies: the contribution that they were made
of may change afterwards.
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
    def receive(self, sender: int, message: ModelMessage) -> bool:
        """Take in a chunk or an average of this version.

        Returns:
            Whether the message came too late to count.

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
    def keep_for_late_pieces(self) -> None:
        """Copy what late pieces will need of the contribution, whose values the rank may change
        after this.
        """

    @abstractmethod
    def mark_dead(self, rank: int) -> None:
        """No more messages of `rank` will arrive."""

    def _make_chunk(
        self,
        mine: Contribution | None,
        begin: int,
        end: int,
        *,
        withheld: bool,
        participants: int = 0,
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
            begin=begin,
        )
        if given is None:
            return chunk
        values, codes = given.values[begin:end], no_codes()
        if self._settings.rounding is not None:
            codes, values = self._settings.rounding.encode(values, begin)
        return replace(
            chunk, weight=given.weight, counters=given.counters, values=values, codes=codes
        )

    def _whole(self, message: ModelMessage) -> Values:
        """All elements of `message`, as they travelled."""
        if message.codes.size and self._settings.rounding is not None:
            return self._settings.rounding.decode((message.codes, message.values), message.begin)
        return message.values


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
