"""What is attached to a script's DistributedDataParallel: a strategy of offbeat's, torch's own
exchange with one of its hooks, or nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.session.attach import attach_through
from offbeat.session.session import Adopted, Session
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver
from offbeat_lab.attaching import LinkDelay, wrap_with
from offbeat_lab.native import CommunicationMeter, Native, NativeSession
from offbeat_lab.options import Recipe

Attached: TypeAlias = Session | NativeSession

ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class NoExchange(Strategy):
    """No exchange: every rank trains a model of its own."""

    name: ClassVar[str] = ALONE
    needs_optimizer: ClassVar[bool] = False

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        return []


class ScriptRecipe(ABC):
    """What `offbeat run` puts into a script.

    Attributes:
        name: of the strategy.
        ddp_exchanges: whether DDP keeps its own reducer.
        ddp_options: options that DDP is made with, in the place of the script's.
        replicas_differ: whether ranks' models differ between steps.
        needs_optimizer: whether it has nothing to do with a model that no optimizer steps; then
            such a model's gradients are exchanged as DDP would.
    """

    name: str
    needs_optimizer: bool = True
    ddp_exchanges: bool = False
    ddp_options: Mapping[str, object] = {}
    replicas_differ: bool = False

    def __init__(self, wrap: Callable[[Driver], Driver]) -> None:
        self.wrap = wrap
        """What is put around the transport."""

    @abstractmethod
    def attach(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> Attached | None:
        """Put it to work on a DDP model. Collective.

        Args:
            ddp: the model.
            optimizer: that steps it; None: no such optimizer is there, perhaps not yet.
            scaler: of its losses.
            adopted: what all ranks take of rank 0's model.

        Returns:
            None where there is nothing to be done without an optimizer.
        """

    @abstractmethod
    def strategy_for_attach(self) -> Strategy:
        """What takes the place of the strategy that a script attaches itself."""


class StrategyRecipe(ScriptRecipe):
    """A strategy of offbeat's.

    Args:
        strategy: which one.
        delay: of this rank's link, where it is imitated in user space.
    """

    def __init__(self, strategy: Strategy, delay: LinkDelay | None = None) -> None:
        super().__init__(wrap_with(delay))
        self.name = strategy.name
        self.replicas_differ = strategy.replicas_differ
        self.needs_optimizer = strategy.needs_optimizer
        self._strategy = strategy

    @override
    def attach(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> Session:
        if self._strategy.shares_samples:
            raise UnsupportedError(
                f"{self.name} shares samples out to whichever worker is free, and a script with"
                " DistributedDataParallel divides its data itself; call offbeat.attach and"
                " session.loader in the script, or choose another strategy"
            )
        if self.replicas_differ and isinstance(ddp.module, torch.nn.ParameterList):
            raise UnsupportedError(
                "replicate() hands DistributedDataParallel a list of parameters, and"
                f" {self.name}, whose models differ between ranks, has to see the model when the"
                " script evaluates and saves it; wrap the model in DistributedDataParallel"
            )
        strategy = self._strategy.for_plain_script()
        if optimizer is None and self.needs_optimizer:
            strategy = AllReduce()
        # Nothing is averaged at the end: a script has evaluated and saved by then.
        return attach_through(
            self.wrap,
            ddp.module,
            optimizer,
            strategy,
            group=ddp.process_group,
            scaler=scaler,
            finish="keep",
            ignored=ddp.parameters_to_ignore,
            adopted=adopted,
        )

    @override
    def strategy_for_attach(self) -> Strategy:
        return self._strategy


class NativeRecipe(ScriptRecipe):
    """DDP's own exchange, with one of torch's hooks.

    Args:
        native: which one.
        delay: of this rank's link, where it is imitated in user space.
    """

    ddp_exchanges = True

    def __init__(self, native: Native, delay: LinkDelay | None = None) -> None:
        super().__init__(wrap_with(delay))
        self.name = native.name
        self.ddp_options = native.ddp_options
        self._native = native
        self._delay = delay

    @override
    def attach(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> NativeSession | None:
        if optimizer is None:
            return None
        meter = CommunicationMeter(dist.get_world_size(), rank=dist.get_rank(), delay=self._delay)
        return self._native.couple(ddp, optimizer, meter)

    @override
    def strategy_for_attach(self) -> Strategy:
        raise ConfigError(
            f"{self.name} works with DistributedDataParallel only, and the script calls"
            " offbeat.attach; choose allreduce, which exchanges the same"
        )


def recipe_for(recipe: Recipe, delay: LinkDelay | None = None) -> ScriptRecipe:
    """What puts `recipe` into a script."""
    if isinstance(recipe, Strategy):
        return StrategyRecipe(recipe, delay)
    return StrategyRecipe(NoExchange()) if recipe.name == ALONE else NativeRecipe(recipe, delay)
