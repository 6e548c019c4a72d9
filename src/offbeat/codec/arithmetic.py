"""The arithmetic that a sparse collective needs, as one object that it is handed.

A collective says who sends what to whom. What it does with entries (partition, add, keep the
largest, encode) it leaves to a `SparseArithmetic`: `codec.wire.Wire` does it with real entries, and
`codec.weightless.WeightlessWire` with their numbers alone, so that the same generator trains and is
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from typing_extensions import TypeVar

from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally

Message: TypeAlias = bytes | bytearray | memoryview
"""What travels. A weightless message has a length and no bytes."""

S = TypeVar("S", default=Sparse)
"""A sparse vector: its entries, or how many there are."""


class BlockArithmetic(Protocol):
    """How several messages travel as one."""

    def join(self, blocks: Sequence[Message]) -> Message:
        """One message of all of them."""

    def split(self, message: Message, count: int) -> Sequence[Message]:
        """Inverse of `join`. Raises `WireError` unless it holds exactly `count` blocks."""


class CarriesCollectives:
    """What hands itself to collectives as their arithmetic."""

    __slots__ = ()

    def carry(
        self,
        collective: Callable[..., Any],
        rank: int,
        world_size: int,
        mine: Any,
        tally: Tally,
        k: int,
    ) -> Any:
        """`collective`, a `collectives.base.SparseCollective`, whose arguments these are."""
        return collective(rank, world_size, mine, tally, k, self)


class SparseArithmetic(BlockArithmetic, Protocol[S]):
    """Operations on sparse vectors `S` and on the messages that carry them."""

    def empty(self) -> S:
        """A vector without entries."""

    def encode(self, entries: S, tally: Tally) -> tuple[Message, S]:
        """A message, and what rounding has left out of it."""

    def decode(self, payload: Message) -> tuple[S, Tally]:
        """Inverse of `encode`. Raises `WireError` for anything else."""

    def add(self, a: S, b: S) -> S:
        """The sum."""

    def add_all(self, sparses: Sequence[S]) -> S:
        """The sum of at least one."""

    def clip_to_median(self, sparses: Sequence[S]) -> Sequence[S]:
        """At least one, those that are longer than the median of all that are not zero shortened
        to it.
        """

    def keep_largest(self, entries: S, k: int) -> tuple[S, S]:
        """The `k` entries of largest magnitude, and the others."""

    def split_common(self, entries: S, other: S) -> tuple[S, S]:
        """Those of `entries` whose index is in `other` too, and the others."""

    def partition(self, entries: S, num_owners: int) -> Sequence[S]:
        """The entries of each owner."""

    def union_disjoint(self, parts: Sequence[S]) -> S:
        """One vector of parts that have no index in common."""

    def count_magnitudes(self, sums: S, k: int, world_size: int) -> Message:
        """A message that says how many entries an owner has of each magnitude."""

    @property
    def read_counts(self) -> Callable[[Message], Any]:
        """Inverse of `count_magnitudes`, for `quotas`."""

    def quotas(self, counts: Sequence[Any], k: int) -> Sequence[int]:
        """How many of its largest entries each owner keeps, so that the k largest of all are."""
