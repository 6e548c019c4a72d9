"""What goes into a group average and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from offbeat.averaging.background.deadlines import Patience
from offbeat.codec.model_wire import Counters, ModelMessage, Note, Values, no_counters
from offbeat.errors import WireError
from offbeat.planning.groups import Meeting


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contribution:
    """A rank's model as it takes part in one version.

    Attributes:
        values: the whole model, float32 or float64, shape (num_elements,). Must not change before
            the version is over.
        step: after which of the rank's steps it was taken, >= 0.
        fresh: whether the rank had come to the end of a step and waits; else it is the last
            snapshot of one that computes.
        weight: with which it counts, > 0.
        counters: the model's integer buffers, int64, shape (`Terms.num_counters`,); of several, the
            largest is taken.
    """

    values: Values
    step: int
    fresh: bool
    weight: float = 1.0
    counters: Counters = field(default_factory=no_counters)

    @property
    def note(self) -> Note:
        return Note(weight=self.weight, step=self.step, fresh=self.fresh)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """The average of a range of elements; the same bits at every member that has it.

    Attributes:
        begin: first element.
        average: sum of the contributions that are in, each times its weight, divided by
            `sum_of_weights`; read-only.
        notes: of every member of the group, in its order.
        contributed: what this rank put in, shape of `average`; None when it is not in.
        fresh: whether this rank is in with a fresh contribution.
        counters: the largest of each counter among the contributions that are in, shape
            (`Terms.num_counters`,); read-only.
    """

    begin: int
    average: Values
    notes: tuple[Note, ...]
    contributed: Values | None
    fresh: bool
    counters: Counters = field(default_factory=no_counters)

    @property
    def end(self) -> int:
        return self.begin + self.average.size

    @property
    def sum_of_weights(self) -> float:
        return sum(note.weight for note in self.notes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What one rank has when it is done with a version.

    Attributes:
        version: which.
        group: its members.
        pieces: the averages that are here, by `begin`. What they do not cover stays as it is: those
            elements were not averaged, or their average is still to come (`Replica.amend`).
        opened_s, closed_s: when this rank came to know of the version and when it was done, on the
            driver's clock.
    """

    version: int
    group: tuple[int, ...]
    pieces: tuple[Piece, ...]
    opened_s: float
    closed_s: float

    @property
    def members(self) -> dict[int, Note]:
        """The note of each member that is in some piece, by rank."""
        notes = {
            rank: note
            for piece in self.pieces
            for rank, note in zip(self.group, piece.notes, strict=True)
            if note.weight
        }
        return {rank: notes[rank] for rank in self.group if rank in notes}


class Replica(Protocol):
    """What the protocol asks of the rank it works for. Called from wherever the protocol runs; must
    not block.
    """

    def contribute(self, version: int) -> Contribution | None:
        """The model as it takes part in `version`, asked once a version; None to stay out of it.

        Fresh when the rank has arrived and waits, at this version or another, whether or not the
        protocol has heard of it.
        """
        ...

    def invite(self, version: int) -> None:
        """`version` has begun and waits for arrivals: arrive there or later at the end of the next
        step, even if late.
        """
        ...

    def gathered(self, version: int) -> None:
        """Enough have arrived at `version`: its average waits for the network alone. Once, unless
        `close` comes first.
        """
        ...

    def close(self, outcome: Outcome) -> None:
        """The version is over; the contribution's buffer is free again."""
        ...

    def amend(self, version: int, piece: Piece) -> None:
        """A piece of a closed version came after all. It has to be merged too, or the mean over
        ranks is not kept.
        """
        ...

    def settle(self, version: int) -> None:
        """Nothing more will come of a version that is closed: what is missing of its average does
        not exist for this rank.
        """
        ...

    def snapshot(self) -> Contribution | None:
        """The model as it is, for a member that asks for it; None while there is none to give. Sent
        before this returns.
        """
        ...

    def receive(self, sender: int, state: Contribution | None) -> None:
        """Member `sender` has been asked and sent its model, read-only, or None: it has none to
        give.
        """
        ...

    def bury(self, rank: int) -> None:
        """Member `rank` is dead or has left, says the driver: nothing more comes from it. Once for
        each.
        """
        ...

    def rested(self, rank: int) -> None:
        """Member `rank`, which may be this one, will not arrive any more; it goes on answering.
        Once for each.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What all members of a generation agree on.

    Attributes:
        members: the ranks, in the same order everywhere.
        generation: number of the membership.
        num_elements: of the model.
        num_counters: of its integer buffers, all together.
        num_averaged: how many elements a version averages, the first ones; None: all of them.
        meeting: the group of a version that this rank is in; every member's answers must fit
            together.
        direct_bytes: groups exchange directly when they are of two, or send no more than this many
            bytes each that way.
        dtype: of its values, float32 or float64.
        patience: for answers and averages, which come as fast as the network allows.
        arrival_patience: for arrivals, where `Meeting.min_fresh` asks for several but not for all.

    A version waits for each kind at most once, so who is killed before any wait is known stalls the
    others for no longer than the two first deadlines together. Models that take longer than that
    make suspects in the first versions, who are taken back when their answers come; the deadlines
    have learned by then.
    """

    members: tuple[int, ...]
    generation: int
    num_elements: int
    meeting: Callable[[int], Meeting]
    num_counters: int = 0
    num_averaged: Callable[[int], int] | None = None
    direct_bytes: int = 65_536
    dtype: np.dtype[np.floating] = field(default_factory=lambda: np.dtype(np.float32))
    patience: Patience = field(default_factory=lambda: Patience(min_samples=4, first_s=0.4))
    arrival_patience: Patience = field(
        default_factory=lambda: Patience(min_samples=2, first_s=0.4, num_mads=4.0, min_spread=0.25)
    )

    def length(self, version: int) -> int:
        """How many elements `version` averages."""
        return self.num_elements if self.num_averaged is None else self.num_averaged(version)


@dataclass(kw_only=True, slots=True)
class Happenings:
    """What one rank has met with, in counts.

    Attributes:
        arrivals: versions this rank arrived at in time.
        answers: versions it contributed to while it was computing.
        late_parts: contributions that reached it after their version was over.
        late_averages: averages that did.
        suspicions: times that another rank was suspected.
        foreign: messages of other generations.
        suspected: the ranks that are suspected now.
        dead: the ranks that are dead.
        resting: the ranks that will not arrive any more, or have finished, oneself included.
    """

    arrivals: int = 0
    answers: int = 0
    late_parts: int = 0
    late_averages: int = 0
    suspicions: int = 0
    foreign: int = 0
    suspected: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    resting: set[int] = field(default_factory=set)


def check_model(
    sender: int,
    message: ModelMessage,
    terms: Terms,
    begin: int,
    end: int,
    *,
    has_values: bool,
    num_elements: int | None = None,
) -> None:
    """Raise `WireError` unless `message` holds elements `begin` to `end` of a model as in `terms`,
    or nothing.

    `num_elements`: of the part of the model that is exchanged; None: all.
    """
    found = (message.num_elements, message.begin, message.values.size, message.counters.size)
    num_values, num_counters = (end - begin, terms.num_counters) if has_values else (0, 0)
    expected = (
        terms.num_elements if num_elements is None else num_elements,
        begin,
        num_values,
        num_counters,
    )
    if found != expected or (message.values.size and message.values.dtype != terms.dtype):
        raise WireError(
            f"rank {sender} sent for version {message.version} (elements of the model, first,"
            f" number, counters) = {found} of {message.values.dtype}, expected were {expected} of"
            f" {terms.dtype}; do all ranks train the same model?"
        )
