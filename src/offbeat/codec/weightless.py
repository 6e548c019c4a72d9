"""Sparse vectors and messages of which only the sizes exist, for simulations.

A `WeightlessWire` stands where a `codec.wire.Wire` does in training. It follows how many entries a
vector has: entries of one rank are k places of `num_places`, drawn at random, so a sum of several
vectors has as many entries as their union is expected to have. `num_places` says how much ranks
agree on what is large: with all elements of the gradient they agree by chance only, with k of them
all ranks choose the same. Headers and the coding of indices are those of the real messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import cast

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.arithmetic import CarriesCollectives, Message
from offbeat.codec.histogram import COUNTER_BYTES, EXPECTED_COUNTERS, MARGIN
from offbeat.codec.histogram import HEAD_BYTES as HISTOGRAM_HEAD_BYTES
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.wire import HEAD_BYTES, LENGTH_BYTES, Wire


@dataclass(frozen=True, slots=True, eq=False)
class WeightlessMessage:
    """A message that has a length, and what its receiver would read in it.

    A virtual cluster passes it on as it is (`VirtualCluster` of the lab).
    """

    num_bytes: int
    content: object

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class WeightlessVector(WeightlessMessage):
    """Part of a vector of `whole` bytes, behind a head that has content."""

    whole: int

    def __getitem__(self, span: slice) -> WeightlessVector:
        """Some of its bytes, as of a `memoryview`."""
        num_bytes = len(range(*span.indices(self.num_bytes)))
        return WeightlessVector(num_bytes, self.content, self.whole)


@dataclass(frozen=True, slots=True, eq=False)
class WeightlessCode(WeightlessVector):
    """A vector that `values` has coded."""

    values: ValueCodec


def weightless(num_bytes: float, content: object = None) -> Message:
    """A message of `num_bytes`, rounded, for protocols that treat messages as opaque."""
    # Nothing reads its bytes: protocols leave that to the arithmetic they are handed.
    return cast(Message, WeightlessMessage(round(num_bytes), content))


@dataclass(frozen=True, slots=True)
class WeightlessSparse:
    """So many entries.

    Attributes:
        num_pairs: expected number, >= 0.
        num_places: where they are, >= num_pairs.
    """

    num_pairs: float
    num_places: float

    # Whoever writes entries into a vector finds none.

    @property
    def indices(self) -> NDArray[np.int64]:
        return np.empty(0, dtype=np.int64)

    @property
    def values(self) -> NDArray[np.float32]:
        return np.empty(0, dtype=np.float32)

    def scaled(self, factor: float) -> WeightlessSparse:
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightlessWire(CarriesCollectives):
    """The arithmetic of sparse collectives (`codec.arithmetic`) with numbers of entries.

    Attributes:
        wire: how real messages are laid out.
        num_places: where ranks' entries are, k <= num_places <= wire.num_elements.
    """

    wire: Wire
    num_places: float

    def empty(self) -> WeightlessSparse:
        return WeightlessSparse(0.0, self.num_places)

    def encode(self, entries: WeightlessSparse, tally: Tally) -> tuple[Message, WeightlessSparse]:
        wire = self.wire
        num_bytes = (
            HEAD_BYTES
            + Tally.num_bytes(wire.num_parameters)
            + wire.indices.expected_bytes(entries.num_pairs, wire.num_elements)
            + wire.values.num_bytes(entries.num_pairs)
        )
        exact = wire.values.is_exact_for(wire.dtype)
        return weightless(num_bytes, (entries, tally)), self.empty() if exact else entries

    def decode(self, payload: Message) -> tuple[WeightlessSparse, Tally]:
        return cast("tuple[WeightlessSparse, Tally]", _content(payload))

    def add(self, a: WeightlessSparse, b: WeightlessSparse) -> WeightlessSparse:
        """Their union, of independent subsets of the same places.

        >>> import numpy as np
        >>> wire = Wire(num_elements=1000, num_parameters=1, dtype=np.dtype(np.float32))
        >>> arithmetic = WeightlessWire(wire=wire, num_places=100.0)
        >>> fifty = WeightlessSparse(50.0, 100.0)
        >>> arithmetic.add(fifty, fifty)
        WeightlessSparse(num_pairs=75.0, num_places=100.0)
        """
        if not a.num_pairs:
            return b
        return WeightlessSparse(a.num_pairs + b.num_pairs - _num_common(a, b), a.num_places)

    def add_all(self, sparses: Sequence[WeightlessSparse]) -> WeightlessSparse:
        return reduce(self.add, sparses)

    def clip_to_median(self, sparses: Sequence[WeightlessSparse]) -> Sequence[WeightlessSparse]:
        return sparses

    def keep_largest(
        self, entries: WeightlessSparse, k: int
    ) -> tuple[WeightlessSparse, WeightlessSparse]:
        return _parted(entries, min(float(k), entries.num_pairs))

    def split_common(
        self, entries: WeightlessSparse, other: WeightlessSparse
    ) -> tuple[WeightlessSparse, WeightlessSparse]:
        return _parted(entries, _num_common(entries, other))

    def partition(self, entries: WeightlessSparse, num_owners: int) -> list[WeightlessSparse]:
        part = WeightlessSparse(entries.num_pairs / num_owners, entries.num_places / num_owners)
        return [part] * num_owners

    def union_disjoint(self, parts: Sequence[WeightlessSparse]) -> WeightlessSparse:
        return WeightlessSparse(
            sum(part.num_pairs for part in parts), sum(part.num_places for part in parts)
        )

    def count_magnitudes(self, sums: WeightlessSparse, k: int, world_size: int) -> Message:
        counters = min(EXPECTED_COUNTERS, 2 * (k // world_size) + MARGIN, sums.num_pairs)
        return weightless(HISTOGRAM_HEAD_BYTES + COUNTER_BYTES * counters, sums.num_pairs)

    @property
    def read_counts(self) -> Callable[[Message], object]:
        return _content

    def quotas(self, counts: Sequence[float], k: int) -> list[int]:
        """The k largest are spread over owners as all entries are."""
        total = sum(counts)
        return [math.ceil(min(k, total) * count / total) if total else 0 for count in counts]

    def join(self, blocks: Sequence[Message]) -> Message:
        return weightless(sum(LENGTH_BYTES + len(block) for block in blocks), tuple(blocks))

    def split(self, message: Message, count: int) -> Sequence[Message]:
        return cast("tuple[Message, ...]", _content(message))


def _num_common(a: WeightlessSparse, b: WeightlessSparse) -> float:
    return a.num_pairs * b.num_pairs / a.num_places if a.num_pairs else 0.0


def _parted(entries: WeightlessSparse, num: float) -> tuple[WeightlessSparse, WeightlessSparse]:
    """So many of them, and the others."""
    others = WeightlessSparse(entries.num_pairs - num, entries.num_places)
    return WeightlessSparse(num, entries.num_places), others


def _content(message: object) -> object:
    assert isinstance(message, WeightlessMessage), "a real message reached a simulation"
    return message.content
