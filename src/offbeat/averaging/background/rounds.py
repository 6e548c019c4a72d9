"""One version of a group average as one member sees it: what it has sent, what it has, what it
still waits for.

Two ways to average. Both end with the same bits at every member that gets an average at all.

- `Direct`: everyone sends its model to everyone and adds them up in the order of the group. One
  message a peer, (S-1) N bytes. All or nothing: members average among themselves only when each
  knows that all of them mean to average in just this party, which is more than half of the group.
- `Scattered`: the model is cut into as many regions as there are members, and each member owns one.
  Everyone sends its part of a region to the owner, who averages what it has and sends that to
  everyone. Two messages a peer, 2 N (S-1) / S bytes. An owner that is not there costs its region
  and no more; a contribution that is not there misses the owner's average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from offbeat.averaging.background.group_base import Contribution, Piece, Terms, check_model
from offbeat.codec.model_wire import ABSENT, Counters, Kind, ModelMessage, Values, no_counters
from offbeat.errors import WireError

Outgoing: TypeAlias = list[tuple[int, bytes]]
"""Messages and whom to send them to. They are copies: the contribution they were made of may change
once they are made.
"""


class Round(ABC):
    """One version at one member. Knows no clock and no network; `group_average` adds both.

    Attributes:
        version, group: which average, among whom.
        contributed: whether this rank has contributed, or has stayed out.
        over: whether this rank is done with the version, but for what may come late.
    """

    def __init__(self, version: int, group: tuple[int, ...], *, rank: int, terms: Terms) -> None:
        self.version = version
        self.group = group
        self.contributed = False
        self.over = False
        self._rank = rank
        self._terms = terms
        self._num_elements = terms.length(version)
        self._parts: dict[int, ModelMessage] = {}
        self._new_pieces: list[Piece] = []
        self._fresh = False
        self._arrived = False

    def is_called(self, min_fresh: int, gone: Set[int], announced: Set[int]) -> bool:
        """Whether all must contribute now: `min_fresh` or all but `gone` have arrived, or somebody
        knows that they have.

        `announced`: those whose word that they have arrived counts, though their parts may still be
            on the way.
        """
        arrived = announced | {rank for rank, part in self._parts.items() if part.arrived}
        return (
            len(arrived) >= min_fresh
            or arrived | gone >= set(self.group)
            or not self._parts.keys() <= arrived
        )

    def take_pieces(self) -> list[Piece]:
        """The averages that have come since the last call."""
        taken, self._new_pieces = self._new_pieces, []
        return taken

    @abstractmethod
    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        """Take part with `mine`, or stay out; `absent` get no values. Returns the messages to send.

        `arrived`: whether this rank has arrived at this version or a later one.
        """

    @abstractmethod
    def take(self, sender: int, message: ModelMessage) -> bool:
        """Take in a part or an average of this version. Returns whether it was too late to count.
        Raises `WireError`.
        """

    @abstractmethod
    def awaited(self) -> Set[int]:
        """Whose messages the round waits for at this point, once this rank has contributed."""

    @abstractmethod
    def go_on(self, absent: Set[int]) -> Outgoing:
        """Do without `absent`, who are all that is awaited. Returns the messages to send."""

    @abstractmethod
    def debtors(self) -> Set[int]:
        """Whose messages may yet bring a piece that this rank is in, after the round is over."""

    @abstractmethod
    def keep_for_late_pieces(self) -> None:
        """Copy what late pieces will need of the contribution, whose buffer is about to be given
        back.
        """

    @abstractmethod
    def bury(self, rank: int) -> None:
        """Rank `rank` will never send anything any more."""

    def _part(
        self, mine: Contribution | None, begin: int, end: int, *, withheld: bool, party: int = 0
    ) -> ModelMessage:
        given = None if withheld else mine
        part = ModelMessage(
            kind=Kind.PART,
            generation=self._terms.generation,
            version=self.version,
            step=-1 if mine is None else mine.step,
            fresh=mine is not None and mine.fresh,
            arrived=self._arrived,
            party=party,
            num_elements=self._num_elements,
            begin=begin,
        )
        if given is None:
            return part
        return replace(
            part, weight=given.weight, counters=given.counters, values=given.values[begin:end]
        )


class Direct(Round):
    """Everyone sends everything to everyone."""

    def __init__(self, version: int, group: tuple[int, ...], *, rank: int, terms: Terms) -> None:
        super().__init__(version, group, rank=rank, terms=terms)
        self._party: frozenset[int] = frozenset()
        self._settled = False

    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        self.contributed = True
        self._arrived = arrived
        self._fresh = mine is not None and mine.fresh
        self._party = frozenset(self.group) - absent
        mask = sum(1 << position for position, rank in enumerate(self.group) if rank in self._party)
        parts = {
            rank: self._part(mine, 0, self._num_elements, withheld=rank in absent, party=mask)
            for rank in self.group
        }
        self._parts[self._rank] = parts.pop(self._rank)
        self._settle()
        return [(peer, part.to_bytes()) for peer, part in parts.items()]

    def take(self, sender: int, message: ModelMessage) -> bool:
        if message.kind != Kind.PART:
            raise WireError(
                f"rank {sender} sent an average of version {self.version}, whose members exchange"
                " without owners"
            )
        check_model(
            sender,
            message,
            self._terms,
            0,
            self._num_elements,
            has_values=message.weight > 0,
            num_elements=self._num_elements,
        )
        is_late = self.over
        self._parts.setdefault(sender, message)
        if self.contributed:
            self._settle()
        return is_late

    def awaited(self) -> Set[int]:
        return self._party - self._parts.keys()

    def go_on(self, absent: Set[int]) -> Outgoing:
        self.over = True
        return []

    def debtors(self) -> Set[int]:
        return set() if self._settled else self.awaited()

    def keep_for_late_pieces(self) -> None:
        mine = self._parts[self._rank]
        self._parts[self._rank] = replace(mine, values=mine.values.copy())

    def bury(self, rank: int) -> None:
        if self.contributed and rank in self.awaited():
            self._settle(failed=True)

    def _settle(self, *, failed: bool = False) -> None:
        """See whether the party is complete, or never will be."""
        if self._settled:
            return
        here = [
            self._parts[rank] for rank in self.group if rank in self._party and rank in self._parts
        ]
        mask = self._parts[self._rank].party
        failed = (
            failed
            or any(part.party != mask for part in here)
            or 2 * len(self._party) <= len(self.group)
        )
        if not failed and len(here) < len(self._party):
            return
        self._settled = self.over = True
        if not failed and any(part.weight for part in here):
            own = self._parts[self._rank]
            self._new_pieces.append(
                Piece(
                    begin=0,
                    average=mean_of(here),
                    notes=tuple(
                        self._parts[rank].note if rank in self._party else ABSENT
                        for rank in self.group
                    ),
                    contributed=own.values if own.weight else None,
                    fresh=self._fresh,
                    counters=largest_of(here),
                )
            )
        self._parts = {
            rank: replace(part, values=part.values[:0]) for rank, part in self._parts.items()
        }


class Scattered(Round):
    """Reduce-scatter and all-gather, with an owner for each region."""

    def __init__(self, version: int, group: tuple[int, ...], *, rank: int, terms: Terms) -> None:
        super().__init__(version, group, rank=rank, terms=terms)
        self._bounds = _bounds(group, self._num_elements)
        self._given: dict[int, Values] = {}
        self._averages: set[int] = set()

    def is_called(self, min_fresh: int, gone: Set[int], announced: Set[int]) -> bool:
        return bool(self._averages) or super().is_called(min_fresh, gone, announced)

    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        self.contributed = True
        self._arrived = arrived
        self._fresh = mine is not None and mine.fresh
        outgoing = []
        for owner in self.group:
            if owner in self._averages:
                continue  # its average is out, without this rank
            part = self._part(mine, *self._bounds[owner], withheld=owner in absent)
            if part.weight:
                self._given[owner] = part.values
            if owner == self._rank:
                self._parts[owner] = part
            else:
                outgoing.append((owner, part.to_bytes()))
        return outgoing

    def take(self, sender: int, message: ModelMessage) -> bool:
        is_late = self.over
        if message.kind == Kind.AVERAGE:
            self._take_average(sender, message)
            return is_late
        check_model(
            sender,
            message,
            self._terms,
            *self._bounds[self._rank],
            has_values=message.weight > 0,
            num_elements=self._num_elements,
        )
        if self._rank in self._averages:
            return True
        self._parts.setdefault(sender, message)
        return False

    def awaited(self) -> Set[int]:
        here = self._averages if self._rank in self._averages else self._parts.keys()
        return set(self.group) - here

    def go_on(self, absent: Set[int]) -> Outgoing:
        if self._rank in self._averages:
            self.over = True
            return []
        parts = self._parts
        in_order = [parts[rank] for rank in self.group if rank in parts]
        begin, _ = self._bounds[self._rank]
        average = ModelMessage(
            kind=Kind.AVERAGE,
            generation=self._terms.generation,
            version=self.version,
            num_elements=self._num_elements,
            begin=begin,
            counters=largest_of(in_order),
            values=mean_of(in_order),
            notes=tuple(parts[rank].note if rank in parts else ABSENT for rank in self.group),
        )
        self._take_average(self._rank, average)
        content = average.to_bytes()
        no_values, no_counters = average.values[:0], average.counters[:0]
        nothing = replace(
            average, values=no_values, counters=no_counters, notes=(ABSENT,) * len(self.group)
        ).to_bytes()
        spared = {rank for rank in absent if rank not in parts or not parts[rank].weight}
        self._parts = {}
        return [
            (rank, nothing if rank in spared else content)
            for rank in self.group
            if rank != self._rank
        ]

    def debtors(self) -> Set[int]:
        return self._given.keys() - self._averages

    def keep_for_late_pieces(self) -> None:
        self._given = {owner: self._given[owner].copy() for owner in self.debtors()}

    def bury(self, rank: int) -> None:
        self._given.pop(rank, None)

    def _take_average(self, owner: int, message: ModelMessage) -> None:
        check_model(
            owner,
            message,
            self._terms,
            *self._bounds[owner],
            has_values=any(note.weight for note in message.notes),
            num_elements=self._num_elements,
        )
        if len(message.notes) != len(self.group):
            raise WireError(
                f"rank {owner} averaged among {len(message.notes)} members, the group has"
                f" {len(self.group)}"
            )
        if owner in self._averages:
            return
        self._averages.add(owner)
        given = self._given.get(owner)
        is_in = given is not None and message.notes[self.group.index(self._rank)].weight > 0
        if message.values.size:
            self._new_pieces.append(
                Piece(
                    begin=message.begin,
                    average=message.values,
                    notes=message.notes,
                    contributed=given if is_in else None,
                    fresh=is_in and self._fresh,
                    counters=message.counters,
                )
            )
        self.over = self.over or self._averages.issuperset(self.group)


def _bounds(group: Sequence[int], num_elements: int) -> dict[int, tuple[int, int]]:
    """The first element of each member's region and the first after it."""
    cuts = [position * num_elements // len(group) for position in range(len(group) + 1)]
    return {rank: (cuts[position], cuts[position + 1]) for position, rank in enumerate(group)}


def mean_of(parts: Sequence[ModelMessage]) -> Values:
    """Their weighted mean, added up in this order; empty when all were withheld. Read-only."""
    weighted = [part for part in parts if part.weight]
    if not weighted:
        return np.empty(0, np.float32)
    total = weighted[0].values * weighted[0].weight
    for part in weighted[1:]:
        total += part.values if part.weight == 1 else part.values * part.weight
    total /= sum(part.weight for part in weighted)
    total.flags.writeable = False
    return total


def largest_of(parts: Sequence[ModelMessage]) -> Counters:
    """The largest of each counter; empty when all were withheld. Read-only."""
    largest = no_counters()
    for part in parts:
        if part.weight:
            largest = np.maximum(largest, part.counters) if largest.size else part.counters.copy()
    largest.flags.writeable = False
    return largest
