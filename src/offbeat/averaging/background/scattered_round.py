"""A group average with an owner for each region of the model; see `rounds`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolSettings,
    check_values,
)
from offbeat.averaging.background.rounds import GroupRound, Outgoing, largest_of, mean_of
from offbeat.codec.model_wire import ABSENT, Codes, MessageKind, ModelMessage, Values, no_codes
from offbeat.codec.rounding import make_up_for_rounding
from offbeat.errors import WireError


class ScatteredRound(GroupRound):
    """A reduce-scatter and an all-gather, with an owner for each region of the model."""

    def __init__(
        self, version: int, group: tuple[int, ...], *, rank: int, settings: ProtocolSettings
    ) -> None:
        super().__init__(version, group, rank=rank, settings=settings)
        self._bounds = _region_bounds(group, self._num_elements)
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
            chunk = self._make_chunk(mine, *self._bounds[owner], withheld=owner in absent)
            if chunk.weight:
                self._contributed_to[owner] = chunk
            if owner == self._rank:
                self._chunks[owner] = chunk
            else:
                outgoing.append((owner, chunk.to_bytes()))
        return outgoing

    def receive(self, sender: int, message: ModelMessage) -> bool:
        is_late = self.over
        if message.kind == MessageKind.AVERAGE:
            self._receive_average(sender, message)
            return is_late
        check_values(
            sender,
            message,
            self._settings,
            *self._bounds[self._rank],
            has_values=message.weight > 0,
        )
        if self._rank in self._averages:
            return True
        self._chunks.setdefault(sender, message)
        return False

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
        begin, _ = self._bounds[self._rank]
        average = ModelMessage(
            kind=MessageKind.AVERAGE,
            generation=self._settings.generation,
            version=self.version,
            num_elements=self._num_elements,
            begin=begin,
            counters=largest_of(in_order),
            values=mean_of(in_order, self._settings.rounding),
            notes=tuple(chunks[rank].note if rank in chunks else ABSENT for rank in self.group),
        )
        average, own = self._rounded(average)
        self._receive_average(self._rank, own)
        content = average.to_bytes()
        without_values = replace(
            average,
            values=average.values[:0],
            codes=no_codes(),
            counters=average.counters[:0],
            notes=(ABSENT,) * len(self.group),
        ).to_bytes()
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

    def keep_for_late_pieces(self) -> None:
        self._contributed_to = {
            owner: replace(chunk, values=chunk.values.copy())
            for owner, chunk in self._contributed_to.items()
            if owner not in self._averages
        }

    def mark_dead(self, rank: int) -> None:
        self._contributed_to.pop(rank, None)

    def _rounded(self, average: ModelMessage) -> tuple[ModelMessage, ModelMessage]:
        """What the other members get of the average of this rank's region, and what it has itself.

        Where values are rounded, it makes up for what rounding takes from all of them. A rank that
        is not in the average cannot, and so rounds nothing.
        """
        rounding, mine = self._settings.rounding, self._contributed_to.get(self._rank)
        if rounding is None or mine is None or not average.values.size:
            return average, average
        codes, exact = rounding.encode(average.values, average.begin)
        own = np.empty_like(average.values)
        share = own.dtype.type(sum(note.weight for note in average.notes) / mine.weight)
        make_up_for_rounding(average.values, codes, share, own)
        rounding.put_exact_(own, exact, average.begin)
        own.flags.writeable = False
        return replace(average, values=exact, codes=codes), replace(average, values=own)

    def _receive_average(self, owner: int, message: ModelMessage) -> None:
        check_values(
            owner,
            message,
            self._settings,
            *self._bounds[owner],
            has_values=any(note.weight for note in message.notes),
        )
        if len(message.notes) != len(self.group):
            raise WireError(
                f"rank {owner} averaged among {len(message.notes)} members, the group has"
                f" {len(self.group)}"
            )
        if owner in self._averages:
            return
        self._averages.add(owner)
        mine = self._contributed_to.get(owner)
        # The note tells whether the owner had this rank's chunk in time.
        is_in = mine is not None and message.notes[self.group.index(self._rank)].weight > 0
        if message.size:
            self._new_pieces.append(self._piece(message, mine if is_in else None))
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
        )


def _region_bounds(group: Sequence[int], num_elements: int) -> dict[int, tuple[int, int]]:
    """For each member, the index of its region's first element and the index after the last."""
    cuts = [position * num_elements // len(group) for position in range(len(group) + 1)]
    return {rank: (cuts[position], cuts[position + 1]) for position, rank in enumerate(group)}
