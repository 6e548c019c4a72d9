"""What a callback tells of one step that was looked at closely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Something that a callback did within a step.

    Attributes:
        kind: what sort of thing.
        what: which one.
        began_s, ended_s: on the monotonic clock, in seconds.
    """

    kind: str
    what: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorAssignment:
    """A Kronecker factor's place in the plan of a second-order strategy.

    Attributes:
        factor: its name, such as ``A of 'conv1'``.
        rows: of each of its matrices.
        matrices: how many there are: the groups of a convolution. 0: a diagonal.
        message: number of the message that sums it over ranks; None where it stays with its owner.
        owner: the rank that inverts it; None: every rank.
        sends: what the owner sends: "inverses" or "preconditioned gradients"; None where every rank
            inverts.
        predicted_s: how long the inversion was expected to take; None where nothing was measured.
    """

    factor: str
    rows: int
    matrices: int
    message: int | None
    owner: int | None
    sends: str | None
    predicted_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One step, looked at closely.

    Attributes:
        spans: what was done in it, in order of ends.
        assignments: the plan, if it is new.
    """

    spans: Sequence[Span]
    assignments: Sequence[FactorAssignment] = ()
