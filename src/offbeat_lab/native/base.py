"""What a strategy of torch's own looks like to the lab."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import UnsupportedError
from offbeat.strategies.base import Strategy
from offbeat_lab.native.session import CommunicationMeter, NativeSession


@dataclass(frozen=True, kw_only=True)
class Native(Strategy):
    """A recipe that torch ships. It trains by `attach` or `couple`; what `build` makes does in a
    step what torch does, and predictions are made of it.
    """

    resumable: ClassVar[bool] = False
    """Whether a checkpoint of model and optimizer is all there is to keep."""
    ddp_options: ClassVar[Mapping[str, Any]] = {}
    """Options of DistributedDataParallel that it needs."""

    @abstractmethod
    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: CommunicationMeter
    ) -> NativeSession:
        """Put it around `model` and `optimizer`, over torch.distributed's default group.
        Collective.
        """

    def couple(
        self,
        module: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        meter: CommunicationMeter,
    ) -> NativeSession:
        """Put it into a DDP model that a script has made with `ddp_options`. Collective."""
        raise UnsupportedError(
            f"{self.name} wraps a model in its own way, so it cannot be put into a script; choose"
            " ddp, ddp-fp16, ddp-bf16, ddp-powersgd, or a strategy of offbeat's"
        )
