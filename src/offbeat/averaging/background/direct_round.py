"""A group average in which every member sends its whole model to every other one; see `rounds`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolSettings,
    check_values,
)
from offbeat.averaging.background.rounds import GroupRound, Outgoing, largest_of, mean_of
from offbeat.codec.model_wire import ABSENT, MessageKind, ModelMessage, no_codes
from offbeat.errors import WireError


class DirectRound(GroupRound):
    """Every member sends its whole model to every other member."""

    def __init__(
        self, version: int, group: tuple[int, ...], *, rank: int, settings: ProtocolSettings
    ) -> None:
        super().__init__(version, group, rank=rank, settings=settings)
        self._participants: frozenset[int] = frozenset()
        self._decided = False

    def contribute(self, mine: Contribution | None, absent: Set[int], *, arrived: bool) -> Outgoing:
        self.contributed = True
        self._arrived = arrived
        self._fresh = mine is not None and mine.fresh
        self._participants = frozenset(self.group) - absent
        mask = sum(
            1 << position for position, rank in enumerate(self.group) if rank in self._participants
        )
        chunks = {
            rank: self._make_chunk(
                mine, 0, self._num_elements, withheld=rank in absent, participants=mask
            )
            for rank in self.group
        }
        self._chunks[self._rank] = chunks.pop(self._rank)
        self._decide()
        return [(peer, chunk.to_bytes()) for peer, chunk in chunks.items()]

    def receive(self, sender: int, message: ModelMessage) -> bool:
        if message.kind != MessageKind.CHUNK:
            raise WireError(
                f"rank {sender} sent an average of version {self.version}, whose members exchange"
                " without owners"
            )
        check_values(
            sender,
            message,
            self._settings,
            0,
            self._num_elements,
            has_values=message.weight > 0,
        )
        is_late = self.over
        self._chunks.setdefault(sender, message)
        if self.contributed:
            self._decide()
        return is_late

    def awaited(self) -> Set[int]:
        return self._participants - self._chunks.keys()

    def proceed_without(self, absent: Set[int]) -> Outgoing:
        # Peers may still send their chunks, and may have averaged already. So this only ends
        # the wait: the average is merged when the missing chunks arrive.
        self.over = True
        return []

    def late_senders(self) -> Set[int]:
        return set() if self._decided else self.awaited()

    def keep_for_late_pieces(self) -> None:
        mine = self._chunks[self._rank]
        self._chunks[self._rank] = replace(mine, values=mine.values.copy())

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
            own = self._chunks[self._rank]
            self._new_pieces.append(
                Piece(
                    begin=0,
                    average=mean_of(here, self._settings.rounding),
                    notes=tuple(
                        self._chunks[rank].note if rank in self._participants else ABSENT
                        for rank in self.group
                    ),
                    contributed=self._whole(own) if own.weight else None,
                    fresh=self._fresh,
                    counters=largest_of(here),
                )
            )
        # The chunks are still needed to tell which members have sent one, but their values are not.
        self._chunks = {
            rank: replace(chunk, values=chunk.values[:0], codes=no_codes())
            for rank, chunk in self._chunks.items()
        }
