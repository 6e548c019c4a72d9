"""Local steps between averages as others ship them: post-local SGD of torch, and LocalSGD of
torchft.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from offbeat.errors import ConfigError
from offbeat.transport.interface import bound_socket, listen_address
from offbeat_lab.native.base import Native
from offbeat_lab.native.ddp import hooked, wrapped
from offbeat_lab.native.session import CommunicationMeter, NativeSession

_TIMEOUT = timedelta(minutes=5)
_JOIN_TIMEOUT_MS = 60_000


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


@dataclass(frozen=True, kw_only=True)
class TorchftLocalSGD(Native):
    """LocalSGD of torchft: local steps, and every few of them an average over the workers in the
    quorum. Needs torchft.

    Attributes:
        period: local steps between averages.
    """

    name: ClassVar[str] = "torchft-localsgd"
    period: int = 4

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"period is {self.period}; allowed is 1 or more")

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            import torchft  # noqa: F401 - whether it is there
        except ImportError as error:
            raise ConfigError(
                f"torchft-localsgd needs torchft ({error}); pip install torchft"
            ) from None

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: CommunicationMeter
    ) -> NativeSession:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import LocalSGD

        rank, world_size, address = dist.get_rank(), dist.get_world_size(), listen_address()
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        lighthouse = None
        if rank == 0:
            lighthouse = LighthouseServer(
                bind=f"{address}:0",
                min_replicas=world_size,
                join_timeout_ms=_JOIN_TIMEOUT_MS,
                quorum_tick_ms=20,
            )
            port = lighthouse.address().rpartition(":")[2]
            store.set("offbeat-lab/lighthouse", f"http://{address}:{port}")
        where = store.get("offbeat-lab/lighthouse").decode()
        with bound_socket(address) as listener:
            own_store = dist.TCPStore(
                address,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )
        manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=world_size,
            use_async_quorum=False,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=own_store.port,
            lighthouse_addr=where,
            replica_id=f"worker-{rank}-",
            hostname=address,
            init_sync=False,
        )
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())

        # torchft is not there to be type-checked
        class MeteredLocalSGD(LocalSGD):  # type: ignore[misc]
            def sync(self) -> None:
                begun_s = time.monotonic()
                meter.reduced(num_bytes, num_collectives=len(list(model.parameters())))
                super().sync()
                meter.hold_back()
                meter.waited(begun_s)

        local = MeteredLocalSGD(manager, model, optimizer, self.period)
        local.__enter__()
        return _TorchftSession(
            model, optimizer, meter, keep=(local, manager, lighthouse, own_store)
        )


class _TorchftSession(NativeSession):
    """Parts from torchft when it closes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        meter: CommunicationMeter,
        *,
        keep: tuple[Any, ...],
    ) -> None:
        notices = [
            "torchft's manager and checkpoint servers listen on every interface, without"
            " authentication"
        ]
        super().__init__(model, optimizer, meter, notices)
        self._local, self._manager, self._lighthouse, self._store = keep

    def close(self) -> None:
        super().close()
        self._local.__exit__(None, None, None)
        dist.barrier()  # no rank's servers may stop while another rank still votes
        self._manager.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
