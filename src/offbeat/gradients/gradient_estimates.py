"""How one bucket becomes the ranks' weighted mean where every rank sends changes only, as EF21
does: each rank has an estimate of its own gradient, moves it by the largest differences, and tells
its peers the same differences, so that all of them know the sum of all estimates.

    difference = share * gradient - own        (share: this rank's weight / the sum of weights)
    sent       = the k largest of difference
    own       += sent
    sum       += all ranks' sent               result: sum

Nothing is owed: what was not sent is part of the next difference as far as it is still true then.

Memory beside the gradient: two buffers of its size; a further one while a step lasts for
half-precision gradients, whose estimates are kept in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from offbeat.codec.residual import add_owed
from offbeat.codec.topk_codec import TopKCodec
from offbeat.collectives.topk_allgather import topk_sum
from offbeat.errors import CheckpointError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import EncodingReduction, EntryAges, WeightedGradient, wire_of
from offbeat.transport.driver import Driver, Stream

_SHARE, _RANKS, _RANK = "share", "ranks", "rank"


class EstimateReduction(EncodingReduction):
    """Weighted mean of the ranks' estimates of their gradients.

    A rank's share of the weights is that of the exchange before, because the sum of weights is
    known only when an exchange is over; it stays where it is while the rank has no weight.

    Args:
        bucket, driver, stream: as of `Reduction`.
        k: how many differences are sent, in [1, elements of the bucket].
        codec: which ones, and how they are written.
    """

    def __init__(
        self, bucket: Bucket, driver: Driver, stream: Stream, *, k: int, codec: TopKCodec
    ) -> None:
        super().__init__(bucket, driver, stream)
        self.ages = self._ages = EntryAges(bucket.num_elements)
        self._k, self._selector, self._wire = k, codec.selector, wire_of(bucket, codec)

        # With the sign changed, since selectors add what they are given to the gradient.
        self._minus_own, self._sum = (
            bucket.flat.new_zeros(bucket.num_elements, dtype=bucket.state_dtype) for _ in range(2)
        )
        self._selector_state = dict(codec.selector.initial_state())
        self._share = 1 / driver.world_size
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._sent = self._wire.empty()
        self._new_selector_state: Mapping[str, float] = self._selector_state
        self._grad_scale, self._weight = 1.0, 0.0

    @override
    def _launch(self, given: WeightedGradient) -> None:
        tally = given.tally
        self._grad_scale, self._weight = given.grad_scale, tally.weight
        self._sent = self._wire.empty()
        self._set_aside(self._minus_own)  # a frozen parameter's gradient has not become zero
        if not tally.num_failed:
            selection = self._selector.select(
                given.gradient.to(self._sum.dtype),
                self._minus_own,
                k=self._k,
                weight=self._share * given.weight / (tally.weight or 1),
                state=self._selector_state,
            )
            self._sent, self._new_selector_state = selection.sparse, selection.state
            tally = replace(tally, num_nonfinite=int(not selection.finite))
        work = self._wire.carry(
            topk_sum, self._driver.rank, self._driver.world_size, self._sent, tally, self._k
        )
        self._pending = self._driver.launch(work, self._stream.next())

    @override
    def _commit(self) -> torch.Tensor:
        exchanged, flat = self._exchanged(), self._bucket.flat
        # A rank's own estimate moves by what its peers decode, which is what it sent minus what
        # rounding in the message has lost.
        add_owed(self._minus_own, self._sent.scaled(-1.0))
        add_owed(self._minus_own, exchanged.owed)
        add_owed(self._sum, exchanged.kept)
        self._bring_back(self._minus_own)
        self._selector_state = dict(self._new_selector_state)
        if self._weight:
            self._share = self._weight / self.tally.weight
        self._ages.after_exchange(self._sent.indices)
        flat.copy_(self._sum).mul_(self._grad_scale)
        self._mark_unused_with_gradient()
        return flat

    @override
    def discard(self) -> None:
        self._bring_back(self._minus_own)

    # State: all that lasts changes at `commit`

    def local_state(self) -> dict[str, float | torch.Tensor]:
        """Both estimates by parameter name, and numbers by the name of the bucket's first
        parameter.
        """
        driver = self._driver
        ranks = {_RANKS: float(driver.world_size), _RANK: float(driver.rank)}
        numbers = {_SHARE: self._share, **ranks}
        state: dict[str, float | torch.Tensor] = {
            self._local_name(key): value for key, value in (self._selector_state | numbers).items()
        }
        for kind, flat in self._kept().items():
            state.update(self._bucket.named(kind, flat))
        return state

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        """With another number of ranks than before, each begins at an equal part of the sum. What
        each of the old ranks had would keep departed ones in the sum for ever.

        Where only one rank's was saved, and all have loaded it, the others share what its estimate
        leaves of the sum: else the mean would be wrong by the difference for ever.
        """
        kept, world_size = self._kept(), self._driver.world_size
        for kind, flat in kept.items():
            for name, view in self._bucket.named(kind, flat).items():
                view.copy_(local[name])
        self._minus_own.copy_(kept["own"]).neg_()
        self._load_numbers(self._selector_state, local)
        self._share = float(_of_any_bucket(_SHARE, local))
        if _of_any_bucket(_RANKS, local) != world_size:
            self._share = 1 / world_size
            torch.mul(self._sum, -self._share, out=self._minus_own)
        elif _of_any_bucket(_RANK, local) != self._driver.rank:
            self._share = (1 - self._share) / (world_size - 1)
            torch.sub(kept["own"], self._sum, out=self._minus_own).div_(world_size - 1)

    def _kept(self) -> dict[str, torch.Tensor]:
        """What lasts, by kind; this rank's estimate as a copy."""
        return {"own": -self._minus_own, "sum": self._sum}


def _of_any_bucket(key: str, local: Mapping[str, Any]) -> Any:
    """A number that is the same in all buckets: the run may have been saved with other ones."""
    found = [value for name, value in local.items() if name.startswith(f"{key}/")]
    if not found:
        raise CheckpointError(f"the state of the gradients' estimates lacks {key!r}")
    return found[0]
