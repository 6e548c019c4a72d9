"""What every sparse collective takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from offbeat.codec import wire
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.planning.costs import Network
from offbeat.transport.operations import Collective, Payload

ValueFormat: TypeAlias = Literal["float32", "float64", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How the messages of one bucket are laid out.

    Attributes:
        num_elements: elements of the bucket.
        num_parameters: parameters of the bucket, the length of `Tally.used`.
        dtype: of the values in memory, float32 or float64.
        value_format: of the values on the wire.
    """

    num_elements: int
    num_parameters: int
    dtype: np.dtype[np.floating]
    value_format: ValueFormat

    def encode(self, sparse: Sparse, tally: Tally) -> tuple[bytes, Sparse]:
        """The message, and what its receivers will not see of `sparse` because the
        format rounds.
        """
        return wire.encode(sparse, tally, value_format=self.value_format)

    def decode(self, payload: Payload) -> tuple[Sparse, Tally]:
        """Inverse of `encode`. Raises `WireError`."""
        return wire.decode(
            payload,
            num_elements=self.num_elements,
            num_parameters=self.num_parameters,
            dtype=self.dtype,
        )

    def empty(self) -> Sparse:
        return Sparse.empty(self.num_elements, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """The outcome of a sparse collective on one rank.

    Attributes:
        kept: the sum that is applied; the same bytes on every rank.
        owed: what this rank must add to its residual. Over all ranks, kept + sum of owed == sum of
            contributions.
        tally: merged over all ranks; the same on every rank.
    """

    kept: Sparse
    owed: Sparse
    tally: Tally


class SparseCollective(Protocol):
    """A protocol that sums sparse contributions: the tree, the reduce-scatter, the all-gather."""

    def __call__(
        self, rank: int, world_size: int, mine: Sparse, tally: Tally, k: int, wire: Wire
    ) -> Collective[Exchanged]:
        """Args: `mine` has about `k` pairs; the result has at most `k` unless the protocol says
        otherwise.
        """
        ...


class CostOf(Protocol):
    """Seconds that a sparse collective takes under the alpha-beta model."""

    def __call__(self, *, world_size: int, k: int, pair_bytes: int, network: Network) -> float: ...
