"""Gradients that leave in buckets while the backward pass goes on: dense ones, and PowerSGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from typing_extensions import override

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.arithmetic.fusion import fuse
from offbeat.collectives import dense
from offbeat.transport.driver import Pending
from offbeat.transport.operations import Collective
from offbeat_lab.plan.methods.stand_ins import all_reduce
from offbeat_lab.plan.profile import FLOAT_BYTES
from offbeat_lab.plan.simulation import Run, Setting, StepMethod, until_over

MIB: Final = 1 << 20


class SoloSteps(StepMethod):
    """Nothing is exchanged: what every other strategy is held against."""

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        profile = run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        yield from run.compute(rank, number, profile.batch.backward_s + profile.optimizer_s)

    @override
    def encode_s(self, setting: Setting) -> float:
        return 0.0

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return 0.0


class PlannedBucket(NamedTuple):
    """Gradients that are exchanged together.

    Attributes:
        num_elements: of all of them.
        complete: when the last one is ready, as a share of the backward pass.
        tensors: their places in the model.
    """

    num_elements: int
    complete: float
    tensors: list[int]


class GradientMethod(StepMethod):
    """Gradients leave in buckets while the backward pass goes on, and are waited for behind it.

    Args:
        bucket_mib: of a bucket; None: all gradients in one, behind the pass.
        first_bucket_mib: of the first one; None: as the others.
    """

    extra_bytes = 1.0

    def __init__(self, bucket_mib: float | None, first_bucket_mib: float | None = None) -> None:
        super().__init__()
        self._caps = [
            None if mib is None else int(mib * MIB) for mib in (bucket_mib, first_bucket_mib)
        ]

    def buckets(self, setting: Setting) -> list[PlannedBucket]:
        return self.remember((setting,), lambda: self._fused(setting))

    def _fused(self, setting: Setting) -> list[PlannedBucket]:
        tensors = setting.profile.tensors
        sizes = [FLOAT_BYTES * tensor.num_elements for tensor in tensors]
        kinds = [None] * len(sizes)
        groups = fuse(sizes, kinds, cap_bytes=self._caps[0], first_cap_bytes=self._caps[1])
        buckets = []
        complete = 0.0  # in one order on all ranks, so none leaves before those ahead of it
        for group in groups:
            complete = max(complete, *(tensors[index].ready for index in group))
            num_elements = sum(tensors[index].num_elements for index in group)
            buckets.append(PlannedBucket(num_elements, complete, group))
        return buckets

    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        """The exchange of one bucket."""
        raise NotImplementedError

    def stage_s(self, setting: Setting, bucket: PlannedBucket) -> float:
        """What a rank computes before a bucket leaves."""
        return setting.profile.bucket_copy_s_per_byte * FLOAT_BYTES * bucket.num_elements

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        setting, profile = run.setting, run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        done = 0.0
        pending: list[Pending[Any]] = []
        buckets = self.buckets(setting)
        for index, bucket in enumerate(buckets):
            work_s = (bucket.complete - done) * profile.batch.backward_s
            yield from run.compute(rank, number, work_s + self.stage_s(setting, bucket))
            done = bucket.complete
            reduction = self.reduce(run, rank, number, bucket)
            pending.append(run.begin(rank, reduction, number * len(buckets) + index))
        yield from run.compute(rank, number, (1 - done) * profile.batch.backward_s)
        yield until_over(*pending)
        written_s = profile.bucket_copy_s_per_byte * profile.num_bytes
        yield from run.compute(rank, number, written_s + profile.optimizer_s)

    @override
    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        """All ranks wait for the last one in each step."""
        return float(setting.durations_s.max(axis=1).mean()) - setting.ideal_s

    @override
    def encode_s(self, setting: Setting) -> float:
        staged_s = sum(self.stage_s(setting, bucket) for bucket in self.buckets(setting))
        return staged_s + setting.profile.bucket_copy_s_per_byte * setting.profile.num_bytes


class DenseGradients(GradientMethod):
    """All-reduce of buckets: AllReduce, DDP, and DDP with a float16 hook.

    Args:
        bucket_mib: of a bucket; None: all gradients in one, behind the pass.
        first_bucket_mib: of the first one; None: as the others.
        element_bytes: of an element as it travels.
    """

    def __init__(
        self,
        bucket_mib: float | None = 25.0,
        first_bucket_mib: float | None = 1.0,
        element_bytes: int = 4,
    ) -> None:
        super().__init__(bucket_mib, first_bucket_mib)
        self._element_bytes = element_bytes

    @override
    def is_like(self, other: StepMethod) -> bool:
        return (
            isinstance(other, DenseGradients)
            and self._caps == other._caps
            and self._element_bytes == other._element_bytes
        )

    @override
    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        yield from all_reduce(run, rank, self._element_bytes * bucket.num_elements)

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return sum(
            dense.cost_s(
                world_size=setting.world_size,
                num_bytes=self._element_bytes * bucket.num_elements,
                network=network,
            )
            for bucket in self.buckets(setting)
        )


class LowRankGradients(GradientMethod):
    """PowerSGD: two factors of each matrix, the second of which waits for the first.

    All gradients are in one bucket, as in `offbeat_lab.native`.

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before the first approximation.
    """

    extra_bytes = 2.0

    def __init__(self, rank: int, start_step: int = 0) -> None:
        super().__init__(None)
        self._rank = rank
        self._start_step = start_step

    def _messages(self, setting: Setting, tensors: Sequence[int]) -> tuple[int, int, int]:
        """Elements: of what is not compressed, of the first factors, of the second ones."""
        whole = first = second = 0
        for index in tensors:
            tensor = setting.profile.tensors[index]
            rows, columns = tensor.rows, tensor.num_elements // tensor.rows
            rank = min(self._rank, rows, columns)
            if (rows + columns) * rank * 2 < tensor.num_elements:
                first, second = first + rows * rank, second + columns * rank
            else:
                whole += tensor.num_elements
        return whole, first, second

    @override
    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        if number < self._start_step:
            yield from all_reduce(run, rank, FLOAT_BYTES * bucket.num_elements)
            return
        yield from run.compute(rank, number, self._approximating_s(run.setting, bucket))
        for num_elements in self._messages(run.setting, bucket.tensors):
            if num_elements:
                yield from all_reduce(run, rank, FLOAT_BYTES * num_elements)

    def _approximating_s(self, setting: Setting, bucket: PlannedBucket) -> float:
        profile = setting.profile
        further = self._rank - 1
        return bucket.num_elements * (
            profile.low_rank_s_per_element + further * profile.low_rank_s_per_element_and_rank
        )

    @override
    def encode_s(self, setting: Setting) -> float:
        approximating_s = sum(
            self._approximating_s(setting, bucket) for bucket in self.buckets(setting)
        )
        return super().encode_s(setting) + approximating_s

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return sum(
            dense.cost_s(
                world_size=setting.world_size, num_bytes=FLOAT_BYTES * size, network=network
            )
            for bucket in self.buckets(setting)
            for size in self._messages(setting, bucket.tensors)
            if size
        )
