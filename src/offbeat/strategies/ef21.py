"""EF21: each rank's gradient is estimated from the changes that it sends, the k largest in each
step (Richtarik, Sokolov and Fatkhullin, arXiv 2106.05203, algorithm 2; with momentum EF21-SGDM,
Fatkhullin, Tyurin and Richtarik, arXiv 2305.15155, algorithm 1).

    rank i:    c_i = the k largest of (gradient - g_i);  g_i += c_i
    everyone:  g  += mean of all c_i                     so g is always the mean of all g_i
    gradient = g

With momentum v_i = momentum v_i + gradient takes the gradient's place.

Error feedback adds up what it does not send, and applies all of it in the end, late. EF21 forgets
it: what has not been sent when the gradient changes is never sent. Its theory needs no bound on
gradients, and where they change little from step to step, with large batches, g comes as close to
the gradient as one likes. With small batches the noise of old batches stays in g for as long as
their entries wait, and momentum averages it out before it is sent. On photographs in batches of
4 x 32, at density 0.01, it reached an accuracy of 0.45 after 800 steps at a learning rate of 0.1
and 0.54 at 0.0125, where all-reduce reached 0.71 and 0.73, and Top-k with error feedback 0.73 and
0.72 (one seed, benchmarks/studies/sparse_accuracy.py).

Cost per step: as of Top-k, ceil(log2 P) messages, (P-1) k pairs sent by each rank; local: one pass
over gradient and estimate (12 bytes a parameter), one to write the result. Memory: two buffers more
than the gradient's, four with momentum.

Differences from the papers:
- g_i begins at 0, not at the compressed first gradient or at the mean of a large batch;
- the momentum is SGD's, v = momentum v + gradient, which is 1 / eta times EF21-SGDM's
  v = (1 - eta) v + eta gradient with eta = 1 - momentum: at eta times the learning rate both are
  the same. By default it is the optimizer's, taken over;
- ranks are weighted by their samples, where these are known;
- values may be rounded to bfloat16 or float8, and what rounding loses stays in the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.sparse import add_owed
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import TopKCodec
from offbeat.collectives.topk_allgather import topk_sum
from offbeat.errors import CheckpointError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.reductions import (
    ExchangePlan,
    Reduction,
    SparseReduction,
    WeightedGradient,
)
from offbeat.strategies.sparse_gradient import EntriesStrategy
from offbeat.transport.driver import Driver, Stream


@dataclass(frozen=True, kw_only=True)
class EF21(EntriesStrategy):
    """Gradients estimated from their largest changes, which are all that travels.

    Args:
        density: fraction of the changes that travel in a step, in (0, 1]; 1 gives the result of
            `AllReduce`.
        momentum_correction: "auto": each rank applies the momentum and weight decay of
            `torch.optim.SGD` before changes are looked for; None: the optimizer has them.
        clip_norm: clip before changes are looked for, as the other sparse strategies do, > 0. None:
            no clipping; clipping after backward is possible then, since nothing is owed.
    """

    trains_islands = True

    density: float = 0.01

    @override
    def clipping(self, world_size: int) -> LocalClipping | None:
        """What clips the mean leaves no more than the step it clips."""
        if self.clip_norm is None:
            return None
        return LocalClipping(self.clip_norm, world_size=world_size)

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        codec, driver, stream = self.entries(), context.driver, context.new_stream()
        k = max(1, round(self.density * bucket.num_elements))
        if k < bucket.num_elements:
            return EstimateReduction(bucket, driver, stream, k=k, codec=codec)
        # All of it travels, so there is nothing to estimate, and nothing is ever owed.
        everything = ExchangePlan(k=bucket.num_elements, collective=None)
        return SparseReduction(bucket, driver, stream, codec=codec, plan=lambda: everything)


_SHARE, _RANKS, _RANK = "share", "ranks", "rank"


class EstimateReduction(SparseReduction):
    """Weighted mean of the ranks' estimates of their gradients.

        difference = share * gradient - own    (share: this rank's weight / the sum of weights)
        sent       = the k largest of difference
        own       += sent
        sum       += all ranks' sent           result: sum

    Half-precision gradients have estimates in float32, and a further buffer.

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
        plan = ExchangePlan(k=k, collective=topk_sum)
        super().__init__(bucket, driver, stream, codec=codec, plan=lambda: plan)
        # With the sign changed, since selectors add what they are given to the gradient.
        self._minus_own = self._residual
        self._sum = torch.zeros_like(self._minus_own)
        self._share = 1 / driver.world_size
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._weight = 0.0

    @property
    @override
    def residual(self) -> None:  # type: ignore[override]  # nothing is owed
        return None

    @override
    def _weigh(self, owed: torch.Tensor, tally: Tally) -> None:
        """An estimate has its share of the weights already."""

    @override
    def _launch(self, given: WeightedGradient) -> None:
        self._weight = given.tally.weight
        share = self._share * given.weight / (self._weight or 1)
        super()._launch(given._replace(weight=share))

    @override
    def _commit(self) -> torch.Tensor:
        exchanged, flat, sent = self._exchanged(), self._bucket.flat, self._picked
        assert sent is not None, "no rank has failed"
        # A rank's own estimate moves by what its peers decode, which is what it sent minus what
        # rounding in the message has lost.
        add_owed(self._minus_own, sent.scaled(-1.0))
        add_owed(self._minus_own, exchanged.owed)
        add_owed(self._sum, exchanged.kept)
        self._bring_back(self._minus_own)
        self._selector_state = dict(self._new_selector_state)
        if self._weight:
            self._share = self._weight / self.tally.weight
        self._ages.after_exchange(sent.indices)
        flat.copy_(self._sum).mul_(self._grad_scale)
        for position in np.flatnonzero(~self.tally.used).tolist():
            # A parameter that was frozen meanwhile must not be moved by estimates of before.
            if not self._bucket.parameters[position].requires_grad:
                self._bucket.views[position].zero_()
        self._mark_unused_with_gradient()
        return flat

    @override
    def send_all(self) -> None:
        """Nothing is owed."""

    # State: all that lasts changes at `commit`

    def local_state(self) -> dict[str, float | torch.Tensor]:
        """Both estimates by parameter name, and numbers by the name of the bucket's first
        parameter.
        """
        driver = self._driver
        ranks = {_RANKS: float(driver.world_size), _RANK: float(driver.rank)}
        numbers = {_SHARE: self._share, **ranks}
        state = super().local_state()
        state |= {self._local_name(key): value for key, value in numbers.items()}
        for kind, flat in self._kept().items():
            state.update(self._bucket.named(kind, flat))
        return state

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        """With another number of ranks than before, each begins at an equal part of the sum. What
        each of the old ranks had would keep departed ones in the sum for ever.

        Where only one rank's was saved, and all have loaded it, the others share what its estimate
        leaves of the sum: else the mean would be wrong by the difference for ever.
        """
        super().load(additive, local)
        kept, world_size = self._kept(), self._driver.world_size
        for kind, flat in kept.items():
            for name, view in self._bucket.named(kind, flat).items():
                view.copy_(local[name])
        self._minus_own.copy_(kept["own"]).neg_()
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
