"""Post-local SGD as torch ships it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from offbeat.errors import ConfigError
from offbeat_lab.native.base import Native
from offbeat_lab.native.ddp import hooked, wrapped
from offbeat_lab.native.session import CommunicationMeter, NativeSession


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Native):
    """Post-local SGD of torch: DDP for the first steps, then local steps with the models averaged
    every few of them.

    Attributes:
        start_step: steps with all-reduced gradients before the local ones begin.
        period: local steps between averages.
    """

    name: ClassVar[str] = "post-localsgd"
    start_step: int = 10
    period: int = 4

    def __post_init__(self) -> None:
        if self.start_step < 0 or self.period < 1:
            raise ConfigError(
                f"start_step is {self.start_step}, allowed is 0 or more; period is {self.period},"
                " allowed is 1 or more"
            )

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
        return NativeSession(module, PostLocalSGDOptimizer(optimizer, averager), meter)


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
