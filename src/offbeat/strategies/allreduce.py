"""S-SGD: dense gradient all-reduce, the baseline of everything here, and what
DistributedDataParallel (arXiv 2006.15704) does.

    for each bucket of gradients, as backward completes it: mean over all ranks
    optimizer step

Cost per step: 2(P-1)/P n elements sent by each rank, overlapped with backward.

Differences from DistributedDataParallel: a non-finite gradient on one rank makes all ranks skip the
step; buffers are broadcast once, when attached, and not before each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.gradients.buckets import make_buckets
from offbeat.gradients.exchange import ExchangeCounts, GradientTransform
from offbeat.gradients.reductions import DenseReduction
from offbeat.strategies.gradient import MIB, GradientStrategy, Reductions
from offbeat.strategies.options import require_positive


@dataclass(frozen=True, kw_only=True)
class AllReduce(GradientStrategy):
    """Dense all-reduce of gradients.

    Args:
        bucket_mib: gradients are fused into buckets of at most this size, > 0.
        first_bucket_mib: the first bucket is smaller, to have something on the wire early, > 0.
    """

    name: ClassVar[str] = "allreduce"
    needs_optimizer: ClassVar[bool] = False

    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("bucket_mib", self.bucket_mib)
        require_positive("first_bucket_mib", self.first_bucket_mib)

    @override
    def as_first_steps(self) -> Self:
        return replace(self, replica_check_interval=0)

    @override
    def reductions(
        self, context: Context, counts: ExchangeCounts, transform: GradientTransform
    ) -> Reductions:
        cap_bytes, first_cap_bytes = int(self.bucket_mib * MIB), int(self.first_bucket_mib * MIB)
        buckets = make_buckets(
            context.parameters, cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes
        )
        return Reductions(
            [
                (bucket, DenseReduction(bucket, context.driver, context.new_stream()))
                for bucket in buckets
            ]
        )
