"""What the averaging protocols take and give.

Both protocols, `group_average` (WAGMA-SGD) and `strategies.adpsgd`, use these types. A protocol
knows its rank only through the rank's `SharedModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.deadlines import DeadlineRule
from offbeat.codec.model_wire import (
    Codes,
    Counters,
    MessageKind,
    ModelMessage,
    Note,
    Values,
    no_counters,
)
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.errors import WireError

_REPLY_DEADLINE: Final = DeadlineRule(min_samples=4, initial_s=0.4)
_ARRIVAL_DEADLINE: Final = DeadlineRule(min_samples=2, initial_s=0.4, num_mads=4.0, min_spread=0.25)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contribution:
    """The model, or the gradient, with which a rank takes part in one version.

    Attributes:
        values: all elements, float32 or float64, shape (num_elements,). They are copied into
            messages before the protocol does anything else.
        step: the number of steps that the rank had made when the values were taken, >= 0.
        fresh: whether the rank had arrived at the end of a step and waits; else the values are the
            last snapshot of a rank that computes.
        weight: the weight of this contribution in the average, > 0.
        counters: the model's integer buffers, int64, shape (`ProtocolSettings.num_counters`,). An
            average has the largest value of each.
        anchor: what differences are taken from where these travel, in the shape of `values`.
    """

    values: Values
    step: int
    fresh: bool
    weight: float = 1.0
    counters: Counters = field(default_factory=no_counters)
    anchor: Values | None = None


class ReadInParts:
    """A vector, made where it is read: of a model's size, it is never in memory as a whole.

    Args:
        size: its number of elements.
        read: makes the elements of a range.
    """

    def __init__(self, size: int, read: Callable[[slice], Values]) -> None:
        self.size, self._read = size, read

    def __getitem__(self, span: slice) -> Values:
        begin, end, _ = span.indices(self.size)
        return self._read(slice(begin, end))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """The average of a range of elements. It has the same bits at every member that receives it,
    except, where values travel rounded, at the one that made it: there it is such that the sum over
    members is that of the contributions.

    Attributes:
        begin: the index of the first element.
        average: the weighted sum of the contributions divided by `sum_of_weights`; read-only. Where
            there are `codes`, the elements that are not rounded alone; likewise in `contributed`.
        notes: one note for each member of the group, in the order of the group.
        contributed: what this rank contributed to the average, in the shape of `average`; None when
            its contribution is not included.
        fresh: whether a fresh contribution of this rank is included.
        counters: the largest value of each counter among the included contributions, shape
            (`ProtocolSettings.num_counters`,); read-only.
        codes: the rounded elements of the average, and of what this rank contributed to it; None
            where `average` and `contributed` have all elements.
        of_changes: whether `average` and `contributed` are decoded differences.
        anchor: the average as all members hold it, from which differences are taken from now on;
            None where they are not.
    """

    begin: int
    average: Values | ReadInParts
    notes: tuple[Note, ...]
    contributed: Values | ReadInParts | None
    fresh: bool
    counters: Counters = field(default_factory=no_counters)
    codes: tuple[Codes, Codes] | None = None
    of_changes: bool = False
    anchor: Values | ReadInParts | None = None

    @property
    def end(self) -> int:
        """The index after the last element."""
        return self.begin + (self.average.size if self.codes is None else self.codes[0].size)

    @property
    def sum_of_weights(self) -> float:
        return sum(note.weight for note in self.notes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VersionResult:
    """What one rank has when it closes a version.

    Attributes:
        version: the number of the version.
        group: the ranks of its group.
        pieces: the averages that have arrived, by `begin`. Elements that they do not cover keep
            their values: they were not averaged, or their average arrives later
            (`SharedModel.merge_late`).
    """

    version: int
    group: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def members(self) -> dict[int, Note]:
        """The note of each member whose contribution is in some piece, by rank."""
        notes = {
            rank: note
            for piece in self.pieces
            for rank, note in zip(self.group, piece.notes, strict=True)
            if note.weight
        }
        return {rank: notes[rank] for rank in self.group if rank in notes}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtocolSettings:
    """What all members of a generation agree on.

    Attributes:
        members: the ranks, in the same order at all of them.
        generation: the number of the generation.
        num_elements: the number of elements of the model.
        num_counters: the number of elements of its integer buffers together.
        group_of: the group of a version to which this rank belongs; the answers of all members must
            be consistent.
        scale: how many elements of the model each of them stands for, >= 1: more in simulations.
        direct_bytes: a group exchanges directly when it has two members, or when no member sends
            more than so many bytes that way.
        dtype: the type of the values, float32 or float64.
        rounding: how contributions and averages are rounded; None: not at all. Models that are
            requested are never rounded.
        changes: how those travel as differences that are not of a global synchronization, which
            everybody takes differences from until the next one; None: like those that are.
        reply_deadline: for contributions and averages, which take only as long as the network does.
        arrival_deadline: for arrivals, where `VersionGroup.min_arrivals` asks for several of them
            but not for all.

    A version waits for each kind of message at most once. A member that is killed before any wait
    is known therefore delays its peers by at most the sum of the two initial deadlines. Models that
    take longer to send than that make members suspected in the first versions. The suspicion ends
    when their messages arrive, and by then the deadlines are longer.
    """

    members: tuple[int, ...]
    generation: int
    num_elements: int
    group_of: Callable[[int], VersionGroup]
    num_counters: int = 0
    scale: float = 1.0
    direct_bytes: int = 65_536
    dtype: np.dtype[np.floating] = field(default_factory=lambda: np.dtype(np.float32))
    rounding: Rounding | None = None
    changes: CodedChanges | None = None
    reply_deadline: DeadlineRule = _REPLY_DEADLINE
    arrival_deadline: DeadlineRule = _ARRIVAL_DEADLINE

    def bytes_per_element(self, version: int) -> float:
        """Of a contribution and of an average."""
        if changes := self.changes_in(version):
            return changes.values.bits / 8
        return self.dtype.itemsize if self.rounding is None else 2

    def changes_in(self, version: int) -> CodedChanges | None:
        """How differences travel in `version`; None: others do."""
        if self.changes is None or self.group_of(version).is_global:
            return None
        return self.changes


@dataclass(kw_only=True, slots=True)
class ProtocolCounts:
    """What one rank's protocol has counted, and what it knows of its peers.

    Attributes:
        suspicions: how often a peer became suspected.
        suspected: the ranks that are suspected now.
        dead: the ranks that are dead.
        stopped: the ranks that take no more steps, or have finished, including this one.
    """

    suspicions: int = 0
    suspected: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)


def check_values(
    sender: int,
    message: ModelMessage,
    settings: ProtocolSettings,
    part: slice | None = None,
    *,
    has_values: bool,
) -> None:
    """Check that a message holds the elements that it should hold.

    Args:
        sender: the rank that sent it, for the error.
        message: the received message.
        settings: the settings of this generation.
        part: the elements that the message should hold; None: all of the model.
        has_values: whether it should hold values; else it must hold none, and no counters.

    Raises:
        WireError: the message holds something else.
    """
    begin, end = (0, settings.num_elements) if part is None else (part.start, part.stop)
    num_values, num_counters = (end - begin, settings.num_counters) if has_values else (0, 0)
    allowed = [(num_values, 0, 0, 0)]
    if num_values and message.kind != MessageKind.MODEL_REPLY:
        changes = settings.changes_in(message.version)
        rounding = settings.rounding if changes is None else Rounding(changes.exact)
        if rounding is not None:
            num_exact = rounding.num_exact(begin, end)
            short = (num_exact, num_values, 0, 0)
            if changes is not None:
                coded_bytes = int(changes.values.num_bytes(num_values))
                short = (num_exact, 0, changes.values.bits, coded_bytes)
            # An owner that is not in its average sends it as it is.
            allowed = [short, *allowed] if message.kind == MessageKind.AVERAGE else [short]
    found = (message.num_elements, message.begin, message.size, message.counters.size)
    expected = (settings.num_elements, begin, num_values, num_counters)
    sizes = (message.values.size, message.codes.size, message.bits, message.coded.size)
    has_type = not message.size or message.values.dtype == settings.dtype
    if found != expected or sizes not in allowed or not has_type:
        raise WireError(
            f"rank {sender} sent for version {message.version} (elements of the model, first,"
            f" number, counters) = {found} of {message.values.dtype}, as (values, codes, bits,"
            f" bytes of codes) = {sizes}; expected were {expected} of {settings.dtype}, as"
            f" {' or '.join(map(str, allowed))}; do all ranks train the same model, and have the"
            " same options?"
        )
