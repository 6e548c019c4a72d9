"""DistributedDataParallel, and the compressing hooks that torch ships with it.

The hooks are torch's own, called from one that takes the time: DDP itself then runs the same code
as with no hook, but for the division by the world size, which torch's `allreduce_hook` does as DDP
does.

And local steps between averages: post-local SGD of torch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import NotNegative, OneOrMore, TwoOrMore
from offbeat.errors import UnsupportedError
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.localsgd import LocalSGD
from offbeat.xmc.label_loss import LabelLayer
from offbeat.xmc.sparse_linear import SparseLinear
from offbeat_lab.native.base import Native
from offbeat_lab.native.planned import HalfPrecisionSteps, LowRankSteps
from offbeat_lab.native.session import CommunicationMeter, NativeSession

Hook: TypeAlias = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
TorchHook: TypeAlias = Callable[[dist.ProcessGroup, GradBucket], torch.futures.Future[torch.Tensor]]

_ONE_BUCKET = "PowerSGD runs in one bucket: over gloo its hook allows no more"


def wrapped(model: nn.Module, options: Mapping[str, Any]) -> DistributedDataParallel:
    """`model`, with parameters on one device, in DDP with these options."""
    # DDP takes every gradient for a dense one but those of torch's own embeddings.
    for module in model.modules():
        if isinstance(module, SparseLinear | LabelLayer):
            module.dense_gradients = True
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def hooked(module: DistributedDataParallel, hook: Hook, meter: CommunicationMeter) -> None:
    """Have `module` call `hook` for each bucket as its gradients are ready.

    Args:
        module: without a hook so far.
        hook: begins the reduction of a bucket.
        meter: counts the time that the hook takes.
    """

    def timed(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        begun_s = time.monotonic()
        future = hook(bucket)
        meter.launched(begun_s, bucket.index())
        return future

    timed.__annotations__ = {}  # torch compares annotations with classes, and these are text
    module.register_comm_hook(None, timed)


@dataclass(frozen=True, kw_only=True)
class DDP(Native):
    """DistributedDataParallel: dense all-reduce of buckets during the backward pass."""

    name: ClassVar[str] = "ddp"
    resumable: ClassVar[bool] = True
    _bytes_per_element: ClassVar[int | None] = None
    torch_hook: ClassVar[TorchHook] = default_hooks.allreduce_hook

    def build(self, context: Context) -> Sequence[Callback]:
        steps = AllReduce() if self._bytes_per_element is None else HalfPrecisionSteps()
        return steps.build(context)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: CommunicationMeter
    ) -> NativeSession:
        return self.couple(wrapped(model, self.ddp_options), optimizer, meter)

    def couple(
        self,
        module: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        meter: CommunicationMeter,
    ) -> NativeSession:
        hooked(module, self._hook(meter), meter)
        return NativeSession(module, optimizer, meter)

    def _hook(self, meter: CommunicationMeter) -> Hook:
        def hook(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            meter.reduced(buffer.numel() * (self._bytes_per_element or buffer.element_size()))
            assert dist.group.WORLD is not None
            return type(self).torch_hook(dist.group.WORLD, bucket)

        return hook


@dataclass(frozen=True, kw_only=True)
class Float16(DDP):
    """DDP with torch's float16 hook: half the bytes, no error feedback."""

    name: ClassVar[str] = "ddp-fp16"
    _bytes_per_element: ClassVar[int | None] = 2
    torch_hook: ClassVar[TorchHook] = default_hooks.fp16_compress_hook


@dataclass(frozen=True, kw_only=True)
class BFloat16(DDP):
    """DDP with torch's bfloat16 hook: half the bytes, the range of float32. Only where the backend
    can add bfloat16.
    """

    name: ClassVar[str] = "ddp-bf16"
    _bytes_per_element: ClassVar[int | None] = 2
    torch_hook: ClassVar[TorchHook] = default_hooks.bf16_compress_hook

    def _hook(self, meter: CommunicationMeter) -> Hook:
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16))
        except RuntimeError as error:
            raise UnsupportedError(
                f"this build's {dist.get_backend()} backend cannot add bfloat16 ({error}); use"
                " ddp-fp16"
            ) from None
        return super()._hook(meter)


@dataclass(frozen=True, kw_only=True)
class PowerSGDHook(DDP):
    """DDP with torch's PowerSGD hook: low-rank gradients with error feedback (Vogels et al.,
    NeurIPS 2019).

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before compression begins, >= 2, since DDP first
            finds its buckets. torch's default is 1000.
    """

    name: ClassVar[str] = "ddp-powersgd"
    resumable: ClassVar[bool] = False
    # With several buckets the hook's chained all-reduces start in another order on each rank, and
    # gloo aborts.
    ddp_options: ClassVar[Mapping[str, Any]] = {"bucket_cap_mb": 1 << 20}
    rank: OneOrMore = 4
    start_step: TwoOrMore = 10

    def build(self, context: Context) -> Sequence[Callback]:
        return LowRankSteps(rank=self.rank, start_step=self.start_step).build(context)

    def couple(
        self,
        module: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        meter: CommunicationMeter,
    ) -> NativeSession:
        session = super().couple(module, optimizer, meter)
        session.notices.append(_ONE_BUCKET)
        return session

    def _hook(self, meter: CommunicationMeter) -> Hook:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_step,
        )

        def hook(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            compressing = state.iter >= self.start_step
            before = state.compression_stats()[2]
            future = powerSGD_hook.powerSGD_hook(state, bucket)
            buffer = bucket.buffer()
            num_elements = state.compression_stats()[2] - before if compressing else buffer.numel()
            # in turn: what stays whole, the factors P, the factors Q
            meter.reduced(
                num_elements * buffer.element_size(), num_collectives=3 if compressing else 1
            )
            return future

        return hook


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Native):
    """Post-local SGD of torch: DDP for the first steps, then local steps with the models averaged
    every few of them.

    Args:
        start_step: steps with all-reduced gradients before the local ones begin.
        period: local steps between averages.
    """

    name: ClassVar[str] = "post-localsgd"
    replicas_differ: ClassVar[bool] = True
    start_step: NotNegative = 10
    period: OneOrMore = 4

    def build(self, context: Context) -> Sequence[Callback]:
        planned = LocalSGD(
            period=self.period, warmup=0, start_step=self.start_step, optimizer_state="local"
        )
        return planned.build(context)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: CommunicationMeter
    ) -> NativeSession:
        # imported here, since torch compiles a dozen optimizers to import one, and with what it
        # calls deprecated itself
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            from torch.distributed.optim import PostLocalSGDOptimizer

        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=self.start_step,
            post_local_gradient_allreduce=False,
        )

        def hook(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if state.iter < self.start_step:
                meter.reduced(bucket.buffer().nbytes)
            return post_localSGD_hook(state, bucket)

        module = wrapped(model, {})
        hooked(module, hook, meter)
        num_bytes = sum(
            parameter.nbytes for group in optimizer.param_groups for parameter in group["params"]
        )
        averager = _MeteredAverager(
            meter, num_bytes, period=self.period, warmup_steps=self.start_step
        )
        session = NativeSession(module, PostLocalSGDOptimizer(optimizer, averager), meter)
        session.replicas_differ = True
        return session


class _MeteredAverager(PeriodicModelAverager):
    def __init__(
        self, meter: CommunicationMeter, num_bytes: int, *, period: int, warmup_steps: int
    ) -> None:
        super().__init__(period=period, warmup_steps=warmup_steps)
        self._meter = meter
        self._num_bytes = num_bytes

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]]
    ) -> None:
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        begun_s = time.monotonic()
        super().average_parameters(params)
        if due:
            self._meter.reduced(self._num_bytes)
            self._meter.hold_back()
            self._meter.waited(begun_s)
