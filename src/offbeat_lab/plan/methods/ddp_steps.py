"""Steps of DistributedDataParallel with the compressing hooks that torch ships, and of workers that
exchange nothing, as strategies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.tally import Tally
from offbeat.collectives.dense import dense_all_reduce
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import ExchangeCounts, GradientTransform
from offbeat.gradients.reductions import DenseReduction
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.gradient import Reductions
from offbeat.transport.operations import Collective


class SoloSteps(Strategy):
    """Nothing is exchanged: what every other strategy is held against."""

    name: ClassVar[str] = "alone"
    replicas_differ: ClassVar[bool] = True

    @override
    def build(self, context: Context) -> list[Callback]:
        return []


@dataclass(frozen=True, kw_only=True)
class HalfPrecisionSteps(AllReduce):
    """Buckets are summed in half precision."""

    @override
    def reductions(
        self, context: Context, counts: ExchangeCounts, transform: GradientTransform
    ) -> Reductions:
        found = super().reductions(context, counts, transform)
        return Reductions([(bucket, _HalfReduction(bucket, context)) for bucket, _ in found.pairs])


class _HalfReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._message = self._message.half()
        self._tail = self._message[bucket.num_elements :]


@dataclass(frozen=True, kw_only=True)
class LowRankSteps(AllReduce):
    """PowerSGD: two factors of each matrix, the second of which waits for the first.

    All gradients are in one bucket, as in `offbeat_lab.native`.

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before the first approximation.
    """

    name: ClassVar[str] = "ddp-powersgd"

    bucket_mib: float = 1 << 20
    first_bucket_mib: float = 1 << 20
    rank: int = 1
    start_step: int = 0

    @override
    def reductions(
        self, context: Context, counts: ExchangeCounts, transform: GradientTransform
    ) -> Reductions:
        found = super().reductions(context, counts, transform)
        return Reductions(
            [(bucket, _LowRankReduction(bucket, context, self)) for bucket, _ in found.pairs]
        )


class _LowRankReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context, steps: LowRankSteps) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._simulated: Any = context.driver
        self._steps = steps
        self._sizes = message_sizes((each.shape for each in bucket.parameters), steps.rank)

    @override
    def launch(
        self, gradient: torch.Tensor, tally: Tally, *, weight: float, grad_scale: float
    ) -> None:
        rank = self._simulated
        if rank.step < self._steps.start_step:
            super().launch(gradient, tally, weight=weight, grad_scale=grad_scale)
            return
        rank.encode(rank.machine.profile.low_rank_s(gradient.numel(), self._steps.rank))
        # What is copied into a bucket and out of it is more than what is sent of it.
        rank.encode(2 * rank.machine.copying_s(gradient.nbytes - 4 * sum(self._sizes)))
        self._sums = [self._driver.launch(self._in_turn(), self._stream.next())]

    def _in_turn(self) -> Collective[Any]:
        for size in self._sizes:
            if size:
                yield from dense_all_reduce(self._message[:size])


def message_sizes(shapes: Iterable[tuple[int, ...]], rank: int) -> tuple[int, int, int]:
    """Elements: of what is not compressed, of the first factors, of the second ones.

    >>> message_sizes([(100,), (10, 20)], rank=2)
    (100, 20, 40)
    """
    whole = first = second = 0
    for shape in shapes:
        rows, columns = shape if len(shape) > 1 else (1, shape[0])
        lower = min(rank, rows, columns)
        if (rows + columns) * lower * 2 < rows * columns:
            first, second = first + rows * lower, second + columns * lower
        else:
            whole += rows * columns
    return whole, first, second
