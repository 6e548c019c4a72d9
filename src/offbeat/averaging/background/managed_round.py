"""A round of group averages, what it waits for, and which rounds are over; see `group_average`."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Literal, TypeAlias

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.direct_round import DirectRound
from offbeat.averaging.background.interface import ProtocolCounts, ProtocolSettings
from offbeat.averaging.background.rounds import GroupRound
from offbeat.averaging.background.scattered_round import ScatteredRound

Phase: TypeAlias = Literal["arrivals", "contributions", "averages"]
"""What a round waits for: that enough members arrive, that all contribute, or that the owners of
regions send their averages.
"""

_MAX_DIRECT_GROUP = 64
_REMEMBERED_VERSIONS = 4096


class ManagedRound:
    """A round, what it waits for, and since when.

    Args:
        version: the number of the version.
        group: its group.
        rank: this rank.
        settings: what the members agree on.
        now_s: when this rank learned of the version.

    Attributes:
        announced: the ranks that have announced their arrival.
        quorum_arrived: whether enough have arrived, and the model has been told.
        contributions_due_s: when all members had to contribute.
        averages_due_s: when this rank had averaged its own region.
    """

    def __init__(
        self,
        version: int,
        group: VersionGroup,
        *,
        rank: int,
        settings: ProtocolSettings,
        now_s: float,
    ) -> None:
        size = len(group.ranks)
        num_bytes = settings.num_elements * settings.bytes_per_element
        # Whether the model is so small that each member can send all of it to all others.
        self.is_small = (size - 1) * num_bytes <= settings.direct_bytes
        is_direct = size <= 2 or (self.is_small and size <= _MAX_DIRECT_GROUP)
        kind = DirectRound if is_direct else ScatteredRound
        self.round: GroupRound = kind(version, group.ranks, rank=rank, settings=settings)
        self.group = group
        self.opened_s = now_s
        self.phase: Phase = "arrivals"
        self.contributions_due_s = math.inf
        self.averages_due_s = math.inf
        self.deadline_s = math.inf
        self.announced: set[int] = set()
        self.quorum_arrived = False

    @property
    def waits_for_all(self) -> bool:
        return self.group.min_arrivals == len(self.group.ranks)

    def must_contribute(self, counts: ProtocolCounts) -> bool:
        """Whether all members must contribute now.

        Where all wait for all, an announcement does not count here: the chunks are waited for
        without a deadline, so that all that take part get the same average.
        """
        return self._is_quorum(counts, frozenset() if self.waits_for_all else self.announced)

    def has_quorum(self, counts: ProtocolCounts) -> bool:
        """Whether the trainer of this rank may stop waiting for arrivals."""
        return self.phase != "arrivals" or (
            self.round.contributed and self._is_quorum(counts, self.announced)
        )

    def _is_quorum(self, counts: ProtocolCounts, announced: Set[int]) -> bool:
        """Whether enough members have arrived; members that will not arrive are not waited for."""
        absent = counts.dead | counts.stopped
        if not self.waits_for_all:
            absent = absent | counts.suspected
        return self.round.must_contribute(self.group.min_arrivals, absent, announced)


class ClosedVersions:
    """The versions that a rank has closed: the latest by number, and all that are much older."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}
        self._newest = -1

    def __contains__(self, version: int) -> bool:
        return version in self._due_s or self._is_forgotten(version)

    def add(self, version: int, due_s: float) -> None:
        """`version` is closed; its contributions were due at `due_s`."""
        self._due_s[version] = due_s
        self._newest = max(self._newest, version)
        if len(self._due_s) > 2 * _REMEMBERED_VERSIONS:
            self._due_s = {
                known: when_s
                for known, when_s in self._due_s.items()
                if not self._is_forgotten(known)
            }

    def due_s(self, version: int) -> float:
        """When the contributions to `version` were due; infinite where that is not known."""
        return self._due_s.get(version, math.inf)

    def _is_forgotten(self, version: int) -> bool:
        return version < self._newest - _REMEMBERED_VERSIONS
