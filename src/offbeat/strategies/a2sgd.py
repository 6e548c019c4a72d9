"""A2SGD: two numbers of each gradient travel, the means of what is positive and of what is negative
in it (arXiv 2006.07405, algorithm 1).

    p = mean of the gradient where it is >= 0;  q = mean of its magnitude where it is < 0
    e = gradient - p where it is >= 0, gradient + q where it is < 0          stays on its rank
    P, Q = means of all ranks' p and q
    gradient = e + P where it is >= 0, e - Q where it is < 0

What stays differs from rank to rank and is applied there, so replicas part, as with local steps of
which only two numbers are shared. After every `period` steps parameters are averaged.

Cost per step: an all-reduce of two numbers for each bucket of gradients, overlapped with backward,
and two passes over the gradient; each `period`, an all-reduce of the model.

Differences from the paper: each bucket has two numbers of its own, where the paper has two of the
whole gradient; replicas are brought together again; it has no averages of parameters. Where several
ranks have samples, P and Q are weighted by them; a rank without any applies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from offbeat.averaging.periodic import Everyone, GrowingPeriod, MeanOfAll, PeriodicAverage
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.reductions import Reduction, WeightedGradient
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class A2SGD(AveragingStrategy):
    """Two numbers of each gradient averaged in every step, and weights once in a while.

    Args:
        period: parameters are averaged after every so many steps, >= 1.
    """

    period: OneOrMore = 16

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _TwoMeans().check(model, optimizer)

    @override
    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        exchange = MeanOfAll(weights, Everyone(context.driver, context.new_stream()))
        average = PeriodicAverage(exchange, GrowingPeriod(self.period))
        return [*_TwoMeans().build(replace(context, replica_check_interval=0)), average]


@dataclass(frozen=True, kw_only=True)
class _TwoMeans(GradientStrategy):
    """Of each bucket, two numbers."""

    bucket_mib = 1.0

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        pairs = [
            (bucket, _TwoMeansReduction(bucket, context.driver, context.new_stream()))
            for bucket in self.buckets(context)
        ]
        # Each rank steps by a gradient of its own, which has a norm of its own.
        return Reductions(pairs, norm_over_ranks=lambda norm: norm)


class _TwoMeansReduction(Reduction):
    """This rank's gradient, in which the means over all ranks stand for its own two means. There
    is no GradScaler.
    """

    # What one exchange leaves for the methods that end it, from `launch` on:
    _weight: float
    _own: torch.Tensor
    _total: torch.Tensor

    @override
    def launch(self, given: WeightedGradient) -> None:
        self._weight = given.tally.weight
        self._own = two_means(given.gradient)
        (self._total,) = self._sum_tallied([self._own.cpu() * self._weight], given.tally)

    @override
    def commit(self) -> torch.Tensor:
        flat = self._bucket.flat
        if not self._weight:
            return flat.zero_()
        total = self._total.to(self._own.device) / self.tally.weight
        positive, negative = total - self._own
        return flat.add_(torch.where(flat < 0, -negative, positive).to(flat.dtype))


def two_means(gradient: torch.Tensor) -> torch.Tensor:
    """The mean of what is not negative, and the mean magnitude of what is; 0 where there is none.
    Shape (2,), float64.
    """
    is_negative = gradient < 0
    num_negative = is_negative.sum(dtype=torch.float64)
    parts = gradient.clamp(min=0), -gradient.clamp(max=0)
    sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
    counts = torch.stack([gradient.numel() - num_negative, num_negative])
    return sums / counts.clamp(min=1)
