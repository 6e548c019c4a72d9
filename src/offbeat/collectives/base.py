"""What every sparse collective takes and gives."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.codec.arithmetic import S, SparseArithmetic
from offbeat.codec.tally import Tally
from offbeat.transport.operations import Collective


class Exchanged(NamedTuple, Generic[S]):
    """The outcome of a sum of what ranks contribute, on one rank.

    Attributes:
        kept: the sum that is applied; the same bytes on every rank.
        owed: what this rank must add to its residual. Over all ranks, kept + sum of owed == sum of
            contributions.
        tally: merged over all ranks; the same on every rank.
    """

    kept: S
    owed: S
    tally: Tally


class SparseCollective(Protocol):
    """A protocol that sums sparse contributions: the tree, the reduce-scatter, the all-gather."""

    def __call__(
        self, rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
    ) -> Collective[Exchanged[S]]:
        """Sum every rank's contribution.

        Args:
            rank: this rank, 0 <= rank < world_size.
            world_size: number of ranks, >= 1.
            mine: this rank's contribution, about `k` pairs.
            tally: this rank's.
            k: how many pairs the result has at most, >= 1, unless the protocol says otherwise.
            wire: layout of the messages, the same on all ranks, and the arithmetic with entries.

        Raises:
            WireError: a message is damaged, or from a rank with another model or options.
            PeerError: a rank has failed.
        """
        ...


class CostOf(Protocol):
    """Seconds that a sparse collective takes under the alpha-beta model."""

    def __call__(
        self, *, world_size: int, k: int, pair_bytes: float, network: NetworkCosts
    ) -> float: ...
