"""What is attached to a script's DistributedDataParallel: a strategy of offbeat's, or nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import UnsupportedError
from offbeat.run.config import RunConfig
from offbeat.run.step_recorder import ExchangeSession
from offbeat.session.attach import attach_through
from offbeat.session.session import Adopted, Session
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import build_strategy
from offbeat.strategies.registry import ALONE, REGISTRY
from offbeat.strategies.sparse_gradient import SparseGradientStrategy
from offbeat.transport.driver import Driver


class ShardedModule:
    """A model that a script has divided by `fully_shard`, with the names that DDP has for what a
    recipe asks.

    Args:
        module: the model.
    """

    parameters_to_ignore: frozenset[str] = frozenset()
    require_backward_grad_sync = True
    process_group = reducer = None

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


@dataclass(frozen=True, kw_only=True)
class NoExchange(Strategy):
    """No exchange: every rank trains a model of its own. Worth nothing, but it shows what the ranks
    could do at best.
    """

    name: ClassVar[str] = ALONE
    needs_optimizer: ClassVar[bool] = False

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        return []


SCRIPT_STRATEGIES: Final[Mapping[str, type[Strategy]]] = ChainMap(
    {ALONE: NoExchange},
    REGISTRY,  # type: ignore[arg-type]  # it is only read
)
"""What `offbeat run` takes by name. A class is imported when it is asked for."""


class ScriptRecipe(ABC):
    """What `offbeat run` puts into a script.

    Attributes:
        name: of the strategy.
        ddp_exchanges: whether DDP keeps its own reducer.
        ddp_options: options that DDP is made with, in the place of the script's.
        replicas_differ: whether ranks' models differ between steps.
        takes_shards: whether it trains models that `fully_shard` has divided.
        needs_optimizer: whether it has nothing to do with a model that no optimizer steps; then
            such a model's gradients are exchanged as DDP would.
    """

    name: str
    needs_optimizer: bool = True
    ddp_exchanges: bool = False
    ddp_options: Mapping[str, object] = {}
    replicas_differ: bool = False
    takes_shards: bool = False

    def __init__(self, wrap: Callable[[Driver], Driver]) -> None:
        self.wrap = wrap
        """What is put around the transport."""

    @abstractmethod
    def attach(
        self,
        ddp: DistributedDataParallel | ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> ExchangeSession | None:
        """Put it to work on a DDP model. Collective.

        Args:
            ddp: the model; of the second kind only if `takes_shards`.
            optimizer: that steps it; None: no such optimizer is there, perhaps not yet.
            scaler: of its losses.
            adopted: what all ranks take of rank 0's model.

        Returns:
            None where there is nothing to be done without an optimizer.
        """

    def backward_ended(self) -> None:  # noqa: B027 - most see it themselves
        """A backward pass of the script's is over."""

    @abstractmethod
    def strategy_for_attach(self) -> Strategy:
        """What takes the place of the strategy that a script attaches itself."""


class StrategyRecipe(ScriptRecipe):
    """A strategy of offbeat's.

    Args:
        strategy: which one.
        wrap: is put around the transport.
    """

    def __init__(
        self, strategy: Strategy, wrap: Callable[[Driver], Driver] = lambda driver: driver
    ) -> None:
        super().__init__(wrap)
        self.name = strategy.name
        self.replicas_differ = strategy.replicas_differ
        self.needs_optimizer = strategy.needs_optimizer
        self.takes_shards = True
        self._strategy = strategy

    @override
    def attach(
        self,
        ddp: DistributedDataParallel | ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> Session | None:
        if self._strategy.shares_samples:
            raise UnsupportedError(
                f"{self.name} shares samples out to whichever worker is free, and a script with"
                " DistributedDataParallel divides its data itself; call offbeat.attach and"
                " session.loader in the script, or choose another strategy"
            )
        is_sharded = isinstance(ddp, ShardedModule)
        if is_sharded and optimizer is None:
            return None  # FSDP's first passes may come before an optimizer is made
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
            finds_islands=is_sharded,
        )

    @override
    def strategy_for_attach(self) -> Strategy:
        return self._strategy


def refuse_clipping_by_value(strategy: Strategy) -> None:
    """Raise `UnsupportedError` where a loop clips gradients by value that `strategy` has sent."""
    exchange = getattr(strategy, "gradients", strategy)  # K-FAC has another one that sends them
    if isinstance(exchange, SparseGradientStrategy):
        raise UnsupportedError(
            f"the loop clips gradients by value, and {exchange.name} has selected entries by then,"
            " so that what is cut off of them would come back; clip by norm, or choose a strategy"
            " that sends whole gradients"
        )


def recipe_for(config: RunConfig) -> ScriptRecipe:
    """What puts the strategy of this run into its script. Raises `ConfigError`."""
    strategy = build_strategy(config.strategy, config.strategy_options, SCRIPT_STRATEGIES)
    return StrategyRecipe(strategy)
