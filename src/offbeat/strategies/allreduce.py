"""S-SGD: dense gradient all-reduce, the baseline of everything here, and what
DistributedDataParallel (arXiv 2006.15704) does.

    for each bucket of gradients, as backward completes it: mean over all ranks
    optimizer step

With a codec, gradients travel in few bits (`collectives.coded_sum`), and what rounding loses is
owed: signs are EF-SignSGD (arXiv 1901.09847), levels at random QSGD (arXiv 1610.02132) with error
feedback.

Cost per step: 2(P-1)/P n elements sent by each rank, overlapped with backward. With a codec, a
buffer of the gradient's size is kept, and two passes of coding are computed.

Differences from DistributedDataParallel: a non-finite gradient on one rank makes all ranks skip the
step; buffers are broadcast once, when attached, and not before each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.value_codecs import ValueCodec
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.coded_reduction import CodedReduction
from offbeat.gradients.reductions import DenseReduction, Reduction
from offbeat.strategies.gradient import MIB, GradientStrategy


@dataclass(frozen=True, kw_only=True)
class AllReduce(GradientStrategy):
    """Dense all-reduce of gradients.

    Args:
        codec: how values travel: a name of `codec.topk_codec.VALUE_CODECS`, such as "linear8" or
            "sign", or a `ValueCodec`; None: as they are.
    """

    trains_islands = True
    can_start = True
    needs_optimizer: ClassVar[bool] = False

    codec: ValueCodec | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec is not None:
            TopKCodec(values=self.codec)  # which refuses what is no codec of values

    @property
    @override
    def takes_complex(self) -> bool:
        return self.codec is None

    @override
    def buckets(self, context: Context) -> list[Bucket]:
        cap_bytes = self.bucket_bytes(context)
        # The first one is smaller, to have something on the wire early.
        first_bytes = None if cap_bytes is None else min(cap_bytes, max(MIB, cap_bytes // 25))
        return make_buckets(context.parameters, cap_bytes=cap_bytes, first_cap_bytes=first_bytes)

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        if self.codec is None:
            return DenseReduction(bucket, context.driver, context.new_stream())
        values = TopKCodec(values=self.codec).values
        return CodedReduction(bucket, values, context.driver, context.new_stream())
