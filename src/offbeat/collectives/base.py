"""What every sparse collective takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.wire import Wire
from offbeat.planning.costs import NetworkCosts
from offbeat.transport.operations import Collective


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

    def __call__(
        self, *, world_size: int, k: int, pair_bytes: int, network: NetworkCosts
    ) -> float: ...
