"""Vectors that travel rounded to bfloat16, all but some of their elements.

Who averages rounded vectors moves its own by `average - rounded`, so what rounding took from it
stays where it was: it is in what the next average is made of.

The kernels below add such vectors up, and move models by them and by vectors that are not rounded,
in one pass over memory: vectors of models are larger than caches, so that each further pass costs
as much as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel
from offbeat.codec.model_wire import Codes, Values
from offbeat.codec.value_codecs import BFloat16Values, ValueCodec

Rounded: TypeAlias = tuple[Codes, Values]
"""A range of a vector: the codes of all its elements, and those elements that are not rounded."""

_CODEC = BFloat16Values()


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds ranges of one vector, and undoes it.

    Attributes:
        exact: the elements that are not rounded, in order. They travel beside the codes.
    """

    exact: tuple[slice, ...] = ()

    def encode(self, values: Values, begin: int) -> Rounded:
        """The elements `values`, shape (any,), of which the first is number `begin`."""
        kept = [values[span] for span in self.spans(begin, begin + values.size)]
        codes: Codes = _CODEC.encode(values)  # type: ignore[assignment]  # 2 bytes a value
        return codes, np.concatenate([*kept, values[:0]])

    def decode(self, rounded: Rounded, begin: int) -> Values:
        """Inverse of `encode` up to rounding, in the type of the exact elements."""
        codes, exact = rounded
        values = _CODEC.decode(codes.view(np.uint8), codes.size).astype(exact.dtype, copy=False)
        self.put_exact_(values, exact, begin)
        return values

    def put_exact_(self, values: Values, exact: Values, begin: int) -> None:
        """Write the exact elements into `values`, of which the first is number `begin`."""
        at = 0
        for span in self.spans(begin, begin + values.size):
            size = span.stop - span.start
            values[span] = exact[at : at + size]
            at += size

    def num_exact(self, begin: int, end: int) -> int:
        """How many of the elements `begin` to `end` are not rounded."""
        return sum(span.stop - span.start for span in self.spans(begin, end))

    def spans(self, begin: int, end: int) -> Iterator[slice]:
        """The exact elements among `begin` to `end`, counted from `begin`."""
        for span in self.exact:
            first, last = max(span.start, begin), min(span.stop, end)
            if first < last:
                yield slice(first - begin, last - begin)


@dataclass(frozen=True, slots=True)
class CodedChanges:
    """Writes differences of a vector from what peers may hold too, and undoes it.

    Who averages decoded differences moves its own vector by their mean less its own one. So the
    weighted sum over members stays what it was, whatever each of them takes differences from, and
    what rounding took from a member stays in its vector: it is part of its next difference.

    Attributes:
        values: writes differences.
        exact: the elements that travel as they are, not as differences, in order.
    """

    values: ValueCodec
    exact: tuple[slice, ...] = ()

    def encode(
        self, values: Values, anchor: Values | None, begin: int
    ) -> tuple[NDArray[np.uint8], Values]:
        """What is sent of `values`, shape (any,), of which the first is number `begin`.

        Args:
            values: elements of the vector, or the differences themselves.
            anchor: what differences are taken from; None: `values` are differences.
        """
        changes = values.copy() if anchor is None else values - anchor
        spans = [*Rounding(self.exact).spans(begin, begin + values.size)]
        for span in spans:
            changes[span] = 0  # or they would set the scale for their neighbours
        coded = self.values.encode(changes).view(np.uint8)
        return coded, np.concatenate([*(values[span] for span in spans), values[:0]])

    def decode(self, coded: NDArray[np.uint8], exact: Values, size: int, begin: int) -> Values:
        """Differences as they were sent, with the exact elements in their places."""
        # Copied, because what was received is not writable, and may not be aligned.
        changes = self.values.decode(coded.copy(), size).astype(exact.dtype, copy=False)
        changes = changes if changes.flags.writeable else changes.copy()
        Rounding(self.exact).put_exact_(changes, exact, begin)
        return changes


def warm() -> None:
    """Compile the kernels, or load them from numba's cache on disk."""
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        values: Values = np.ones(1, dtype=dtype)
        own, _ = Rounding().encode(values, 0)
        received, average = own.copy(), values.copy()
        for vector in (received, average):
            vector.flags.writeable = False
        make_up_for_rounding(average, own, average[0], values.copy())
        for codes in (own, received):
            add_rounded(values, codes, values[0])
        move_by_rounded(values, received, received, values.copy())
        for new in (values, average):
            move_by(values, new, values, values.copy())
        copy_to(values, values.copy())


@kernel
def move_by(mine: Values, new: Values, old: Values, out: Values) -> bool:
    """out = mine + (new - old), all shape (n,). Returns whether `new` is finite."""
    finite = True
    for i in range(mine.size):
        value = new[i]
        out[i] = mine[i] + (value - old[i])
        finite &= np.isfinite(value)
    return finite


@kernel
def copy_to(new: Values, out: Values) -> bool:
    """out = new, both shape (n,). Returns whether that is finite."""
    finite = True
    for i in range(new.size):
        value = new[i]
        out[i] = value
        finite &= np.isfinite(value)
    return finite


@kernel
def _number(code: np.uint16) -> np.float32:
    return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)


@kernel
def add_rounded(total: Values, codes: NDArray[np.uint16], weight: np.floating) -> None:
    """total += weight * the numbers that `codes` stand for; `weight` of the type of `total`."""
    for i in range(total.size):
        total[i] += weight * _number(codes[i])


@kernel
def make_up_for_rounding(
    average: Values, codes: NDArray[np.uint16], share: np.floating, out: Values
) -> None:
    """out = rounded + share * (average - rounded), where `codes` stand for what is rounded."""
    for i in range(average.size):
        rounded = _number(codes[i])
        out[i] = rounded + share * (average[i] - rounded)


@kernel
def move_by_rounded(
    mine: Values, average: NDArray[np.uint16], contributed: NDArray[np.uint16], out: Values
) -> None:
    """out = mine + (average - contributed), of which the last two are codes; all shape (n,)."""
    for i in range(mine.size):
        out[i] = mine[i] + (_number(average[i]) - _number(contributed[i]))
