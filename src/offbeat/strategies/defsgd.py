"""DEF: in each step all ranks send the same part of their gradients, drawn anew (Xu, Huo and Huang,
arXiv 2004.05298, algorithm 1).

    acc = residual + gradient                     with SGD's momentum, on each rank
    of each parameter a block of 1 / ratio of its elements, from a place on that all ranks draw
    alike; the last element is followed by the first
    gradient = mean of all ranks' acc in the block, 0 elsewhere; residual = acc, 0 in the block

No place travels, and blocks are summed by an all-reduce of any backend.

Cost per step: 2(P-1)/P n / ratio elements sent by each rank; three passes over the gradient and a
buffer of its size.

Differences from the paper: its `lambda` is 0, which is plain error feedback. With a lambda of 0.3
gradients are computed at x - lambda e, e being what the rank owes, times the learning rate. Ranks'
parameters would be apart during a step then, and an exchange of gradients has no place for that:
it leaves parameters to the optimizer, and replicas are compared. What is owed follows the learning
rate, which is what the paper's sum of lr m comes to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.tally import Tally
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.exchange import ExchangeCounts, GradientTransform
from offbeat.gradients.optimizer_momentum import momentum_to_take
from offbeat.gradients.parameter_groups import GroupRanges, OwedRate
from offbeat.gradients.reductions import ResidualReduction, TalliedSum
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.strategies.options import require_at_least
from offbeat.strategies.sparse_gradient import require_real


@dataclass(frozen=True, kw_only=True)
class DEFSGD(GradientStrategy):
    """A random part of the gradient, the same on all ranks, and the rest is owed.

    Args:
        ratio: one of so many elements travels in a step, >= 1.
    """

    name: ClassVar[str] = "defsgd"

    ratio: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ratio", self.ratio, 1)

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        require_real(model)

    @override
    def transform(self, context: Context, counts: ExchangeCounts) -> GradientTransform:
        optimizer, taken = context.optimizer, None
        if type(optimizer) is torch.optim.SGD:
            world_size, inform = context.driver.world_size, context.notices.inform
            taken = momentum_to_take(optimizer, world_size=world_size, inform=inform)
        return taken or GradientTransform(optimizer)

    @override
    def reductions(
        self, context: Context, counts: ExchangeCounts, transform: GradientTransform
    ) -> Reductions:
        pairs = []
        for bucket in make_buckets(context.parameters, cap_bytes=None):
            transform.init(bucket, None)
            pairs.append((bucket, _BlockReduction(bucket, context, transform, ratio=self.ratio)))
        return Reductions(pairs)


class _BlockReduction(ResidualReduction):
    """The weighted mean of one block of each parameter."""

    def __init__(
        self, bucket: Bucket, context: Context, transform: GradientTransform, *, ratio: int
    ) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._sizes = np.diff(bucket.offsets)
        lengths = -(-self._sizes // ratio)
        self._parameter = np.repeat(np.arange(lengths.size), lengths)
        self._within = np.concatenate([np.arange(length) for length in lengths])
        self._num_exchanges = 0
        assert context.optimizer is not None
        self._owed_rate = OwedRate(
            GroupRanges(bucket, context.optimizer),
            rates=transform.rates,
            leads_to_plain_steps=transform.leaves_plain_steps,
        )
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._block = torch.zeros(0, dtype=torch.int64)
        self._sum: TalliedSum | None = None
        self._total = self._residual

    def _draw(self) -> torch.Tensor:
        """Places of the elements that travel, the same on all ranks."""
        draws = np.random.default_rng([self._bucket.num_elements, self._num_exchanges])
        starts = (draws.random(self._sizes.size) * self._sizes).astype(np.int64)
        sizes = self._sizes[self._parameter]
        places = (starts[self._parameter] + self._within) % sizes
        places += np.asarray(self._bucket.offsets)[self._parameter]
        return torch.from_numpy(places).to(self._residual.device)

    @override
    def launch(
        self, gradient: torch.Tensor, tally: Tally, *, weight: float, grad_scale: float
    ) -> None:
        begin_s = time.perf_counter()
        self._owed_rate.follow(self._residual)
        tally = self._stage(gradient, tally, weight=weight, grad_scale=grad_scale)
        self._block = self._draw()
        self._sum = TalliedSum([self._mine[self._block]], tally, self._driver, self._stream)
        self.encode_s += time.perf_counter() - begin_s

    @override
    def wait(self) -> torch.Tensor:
        assert self._sum is not None, "nothing was launched"
        (self._total,), tail = self._sum.wait()
        return tail

    @override
    def commit(self) -> torch.Tensor:
        begin_s = time.perf_counter()
        total = torch.zeros_like(self._mine)
        total[self._block] = self._total
        self._mine[self._block] = 0
        self._residual, self._mine = self._mine, self._residual
        flat = self._show(total)
        self._mark_unused_with_gradient()
        self._num_exchanges += 1
        self.encode_s += time.perf_counter() - begin_s
        return flat

    @override
    def local_state(self) -> dict[str, float | torch.Tensor]:
        state = {"num_exchanges": float(self._num_exchanges), **self._owed_rate.state()}
        return {self._local_name(key): value for key, value in state.items()}

    @override
    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        super().load(additive, local)
        first = self._bucket.names[0]
        mine = {
            key.removesuffix(f"/{first}"): value
            for key, value in local.items()
            if key.endswith(f"/{first}")
        }
        self._num_exchanges = int(mine.get("num_exchanges", 0))
        self._owed_rate.load(mine)
