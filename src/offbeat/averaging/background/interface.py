"""What the averaging protocols take and give, and what they need to know of the rank they serve.

Both protocols, `group_average` (WAGMA-SGD) and `pair_average` (AD-PSGD), use these types. A
protocol knows its rank only through a `ProtocolPort`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

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
from offbeat.codec.rounding import Rounding
from offbeat.errors import WireError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contribution:
    """The model, or the gradient, with which a rank takes part in one version.

    Attributes:
        values: all elements, float32 or float64, shape (num_elements,). They must not change before
            the version is closed.
        step: the number of steps that the rank had made when the values were taken, >= 0.
        fresh: whether the rank had arrived at the end of a step and waits; else the values are the
            last snapshot of a rank that computes.
        weight: the weight of this contribution in the average, > 0.
        counters: the model's integer buffers, int64, shape (`ProtocolSettings.num_counters`,). An
            average has the largest value of each.
        interval: after how many steps the rank would average, in [1, 255]; 0: it does not say.
    """

    values: Values
    step: int
    fresh: bool
    weight: float = 1.0
    counters: Counters = field(default_factory=no_counters)
    interval: int = 0

    @property
    def note(self) -> Note:
        return Note(weight=self.weight, step=self.step, fresh=self.fresh)


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
    """

    begin: int
    average: Values
    notes: tuple[Note, ...]
    contributed: Values | None
    fresh: bool
    counters: Counters = field(default_factory=no_counters)
    codes: tuple[Codes, Codes] | None = None

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
            (`ProtocolPort.merge_late`).
        opened_s, closed_s: when this rank learned of the version, and when it closed it, in seconds
            of the driver's clock.
    """

    version: int
    group: tuple[int, ...]
    pieces: tuple[Piece, ...]
    opened_s: float
    closed_s: float

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


class ProtocolPort(Protocol):
    """What an averaging protocol asks of, and tells, the rank that it serves.

    The calls come from the thread that runs the protocol. They must not block.
    """

    def contribute(self, version: int) -> Contribution | None:
        """The contribution to `version`; None to stay out of it. Called once for each version.

        The contribution is fresh when the rank has arrived and waits, at this version or another
        one, whether or not the protocol has received the arrival yet.
        """
        ...

    def invite(self, version: int) -> None:
        """`version` has begun and waits for arrivals: the rank should arrive there, or at a later
        version, at the end of its next step, even if it is late.
        """
        ...

    def hear_interval(self, member: int, interval: int) -> None:
        """`member` would average after so many steps; see `Contribution.interval`."""
        ...

    def quorum_arrived(self, version: int) -> None:
        """Enough ranks have arrived at `version`, so its average now depends on the network alone.
        Called at most once, and not after `close`.
        """
        ...

    def await_step(self, version: int) -> bool:
        """Peers may come to wait for the end of this rank's step: it contributed to `version`
        before it arrived. The protocol must be told when the step has ended, by an arrival at
        `version` or a later one.

        Returns:
            Whether the rank computes a step; False where it has ended one, and waits.
        """
        ...

    def hold(self, late: Set[int]) -> None:
        """From now on the rank must begin no step before the ranks `late` have ended theirs; none:
        it need not wait for any. Called when this changes.
        """
        ...

    def close(self, result: VersionResult) -> None:
        """The version is closed. The protocol does not need the contribution's values any more."""
        ...

    def merge_late(self, version: int, piece: Piece) -> None:
        """A piece of a closed version has arrived after all. It must be merged, because peers have
        merged it, and without it the mean over ranks would change.
        """
        ...

    def finalize_version(self, version: int) -> None:
        """No further piece of this closed version will arrive: what is missing of its average does
        not exist for this rank.
        """
        ...

    def snapshot(self) -> Contribution | None:
        """The current model, for a member that requested it; None while there is no model. The
        values are copied into a message before this rank does anything else.
        """
        ...

    def receive_model(self, sender: int, model: Contribution | None) -> None:
        """Member `sender` has answered a request for its model, with read-only values or, if it has
        no model, with None.
        """
        ...

    def mark_dead(self, rank: int) -> None:
        """The driver says that member `rank` is dead or has left: nothing more arrives from it.
        Called once for each.
        """
        ...

    def mark_final(self) -> None:
        """No living member takes a step any more, and every average that this rank contributed to
        has arrived. Its model changes no more, unless by a version of a member that it takes for
        dead. Called once.
        """
        ...

    def end_training(self) -> None:
        """`ProtocolSettings.ends_with` members take no more steps: what this rank learns in further
        steps does not count.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtocolSettings:
    """What all members of a generation agree on.

    Attributes:
        members: the ranks, in the same order at all of them.
        generation: the number of the generation.
        num_elements: the number of elements of the model.
        num_counters: the number of elements of its integer buffers together.
        num_averaged: how many elements a version averages, beginning with the first; None: all.
        group_of: the group of a version to which this rank belongs; the answers of all members must
            be consistent.
        direct_bytes: a group exchanges directly when it has two members, or when no member sends
            more than so many bytes that way.
        dtype: the type of the values, float32 or float64.
        rounding: how contributions and averages are rounded; None: not at all. Models that are
            requested are never rounded.
        reply_deadline: for contributions and averages, which take only as long as the network does.
        ends_with: when so many members take no more steps, those of the others do not count; None:
            they always do.
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
    num_averaged: Callable[[int], int] | None = None
    direct_bytes: int = 65_536
    dtype: np.dtype[np.floating] = field(default_factory=lambda: np.dtype(np.float32))
    rounding: Rounding | None = None
    ends_with: int | None = None
    reply_deadline: DeadlineRule = field(
        default_factory=lambda: DeadlineRule(min_samples=4, initial_s=0.4)
    )
    arrival_deadline: DeadlineRule = field(
        default_factory=lambda: DeadlineRule(
            min_samples=2, initial_s=0.4, num_mads=4.0, min_spread=0.25
        )
    )

    def length(self, version: int) -> int:
        """The number of elements that `version` averages."""
        return self.num_elements if self.num_averaged is None else self.num_averaged(version)

    @property
    def bytes_per_element(self) -> int:
        """Of a contribution and of an average."""
        return self.dtype.itemsize if self.rounding is None else 2


@dataclass(kw_only=True, slots=True)
class ProtocolCounts:
    """What one rank's protocol has counted, and what it knows of its peers.

    Attributes:
        arrivals: the versions at which this rank arrived before it had contributed to them.
        stale_contributions: the versions to which a snapshot was contributed on its behalf while it
            was computing.
        late_chunks: contributions that arrived here after their version was closed.
        late_averages: averages that arrived here after their version was closed.
        suspicions: how often a peer became suspected.
        foreign: messages of other generations.
        suspected: the ranks that are suspected now.
        dead: the ranks that are dead.
        stopped: the ranks that take no more steps, or have finished, including this one.
    """

    arrivals: int = 0
    stale_contributions: int = 0
    late_chunks: int = 0
    late_averages: int = 0
    suspicions: int = 0
    foreign: int = 0
    suspected: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)


def check_values(
    sender: int,
    message: ModelMessage,
    settings: ProtocolSettings,
    begin: int,
    end: int,
    *,
    has_values: bool,
    num_elements: int | None = None,
) -> None:
    """Check that a message holds the elements that it should hold.

    Args:
        sender: the rank that sent it, for the error.
        message: the received message.
        settings: the settings of this generation.
        begin: the index of the first element that the message should hold.
        end: the index after the last one.
        has_values: whether it should hold values; else it must hold none, and no counters.
        num_elements: the number of elements that this version averages; None: all of the model.

    Raises:
        WireError: the message holds something else.
    """
    found = (message.num_elements, message.begin, message.size, message.counters.size)
    num_values, num_counters = (end - begin, settings.num_counters) if has_values else (0, 0)
    expected = (
        settings.num_elements if num_elements is None else num_elements,
        begin,
        num_values,
        num_counters,
    )
    if found != expected or (message.size and message.values.dtype != settings.dtype):
        raise WireError(
            f"rank {sender} sent for version {message.version} (elements of the model, first,"
            f" number, counters) = {found} of {message.values.dtype}, expected were {expected} of"
            f" {settings.dtype}; do all ranks train the same model?"
        )
    rounding = None if message.kind == MessageKind.MODEL_REPLY else settings.rounding
    is_rounded = message.codes.size > 0
    if is_rounded != (rounding is not None and num_values > 0) and not (
        # An owner that is not in its average sends it as it is.
        rounding is not None and message.kind == MessageKind.AVERAGE
    ):
        raise WireError(
            f"rank {sender} sent {'' if is_rounded else 'no '}rounded values for version"
            f" {message.version}; do all ranks have the same options?"
        )
    if is_rounded and rounding is not None:
        num_exact = rounding.num_exact(begin, end)
        if message.values.size != num_exact:
            raise WireError(
                f"rank {sender} sent {message.values.size} values for version {message.version}"
                f" that are not rounded, expected were {num_exact}; do all ranks train the same"
                " model?"
            )
