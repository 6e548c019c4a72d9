"""What torch's hooks do in a step, by callbacks of offbeat's, of which predictions are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.collectives.dense import dense_all_reduce
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import DenseReduction, Reduction, WeightedGradient
from offbeat.strategies.allreduce import AllReduce
from offbeat.transport.operations import Collective


@dataclass(frozen=True, kw_only=True)
class HalfPrecisionSteps(AllReduce):
    """Buckets are summed in half precision."""

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return _HalfReduction(bucket, context)


class _HalfReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._message = self._message.half()
        self._tail = self._message[bucket.num_elements :]


@dataclass(frozen=True, kw_only=True)
class LowRankSteps(AllReduce):
    """PowerSGD: two factors of each matrix, the second of which waits for the first.

    All gradients are in one bucket, as with `PowerSGDHook`.

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before the first approximation.
    """

    bucket_mib = 1 << 20

    rank: int
    start_step: int

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return _LowRankReduction(bucket, context, self)


class _LowRankReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context, steps: LowRankSteps) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._simulated: Any = context.driver
        self._steps = steps
        self._sizes = message_sizes((each.shape for each in bucket.parameters), steps.rank)

    @override
    def launch(self, given: WeightedGradient) -> None:
        rank = self._simulated
        if rank.step < self._steps.start_step:
            super().launch(given)
            return
        rank.encode(rank.machine.profile.hook_s(given.gradient.numel(), self._steps.rank))
        # What is copied into a bucket and out of it is more than what is sent of it.
        rank.encode(2 * rank.machine.copying_s(given.gradient.nbytes - 4 * sum(self._sizes)))
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
