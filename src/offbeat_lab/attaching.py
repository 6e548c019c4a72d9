"""Puts a run's recipe, which is one of offbeat's strategies or one that torch ships, to work on a
task's model or into a script.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost
from offbeat.errors import ConfigError
from offbeat.run.recipes import ScriptRecipe, ShardedModule, StrategyRecipe
from offbeat.run.records import RunDirectory
from offbeat.run.step_recorder import AttachedModel
from offbeat.session.attach import attach_through
from offbeat.session.session import Adopted, Session
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver
from offbeat_lab.config import cluster_of
from offbeat_lab.emulation.delaying import Delaying, StepTimeEmulator
from offbeat_lab.native import CommunicationMeter, Native, NativeSession
from offbeat_lab.records import emulation_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskModel(AttachedModel):
    """A task's model with a recipe at work on it.

    Attributes:
        module: to be called in the forward pass; it may wrap the model, as DDP does.
        optimizer: to be stepped.
        session: what the recipe does; to be closed.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session | NativeSession

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass, with whatever exchange belongs to it."""
        loss.backward()
        if isinstance(self.session, NativeSession):
            self.session.meter.backward_done()

    def averaged_model(self) -> nn.Module:
        """The model to evaluate: where replicas differ on purpose, their mean. Collective unless
        the session averages alone.
        """
        session = self.session
        if isinstance(session, Session):
            return session.averaged_model() if session.strategy.replicas_differ else self.model
        return mean_of_all(self.model) if session.replicas_differ else self.model


def mean_of_all(model: nn.Module) -> nn.Module:
    """A copy of `model` with the mean of all ranks' parameters. Collective, in the default group,
    and of no strategy's bytes.
    """
    mean = copy.deepcopy(model)
    for parameter in mean.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()
    return mean


def attach_recipe(
    recipe: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world_size: int,
    link: LinkCost | None = None,
) -> TaskModel:
    """Attach `recipe`. Collective.

    Args:
        recipe: of the run.
        model: the task's.
        optimizer: of its parameters.
        world_size: how many ranks there are.
        link: what a message of this rank costs, where its link is imitated in user space.

    Raises:
        OffbeatError: the recipe cannot work with this model, or the ranks do not find each other.
    """
    if isinstance(recipe, Native):
        meter = CommunicationMeter(world_size, link)
        native = recipe.attach(model, optimizer, meter)
        return TaskModel(
            model=model, module=native.module, optimizer=native.optimizer, session=native
        )
    # The lab measures averaged models while the session stands, and uses none afterwards.
    session = attach_through(wrap_with(link), model, optimizer, recipe, finish="keep")
    return TaskModel(model=model, module=model, optimizer=optimizer, session=session)


def wrap_with(link: LinkCost | None) -> Callable[[Driver], Driver]:
    """What `attach_through` is to put around the driver, where links are imitated in user space."""
    return (lambda driver: driver) if link is None else (lambda driver: Delaying(driver, link))


def imitated_link(record: RunDirectory, rank: int) -> LinkCost | None:
    """That of `rank`; None where links are real, or the kernel imitates them."""
    cluster, emulation = cluster_of(record.config), emulation_of(record)
    if cluster is None or emulation is None or emulation.kind != "delaying":
        return None
    link = cluster.link_of(rank)
    return LinkCost(alpha_s=link.latency_s, beta_s_per_byte=1 / link.bytes_per_s)


class NativeRecipe(ScriptRecipe):
    """DDP's own exchange, with one of torch's hooks.

    Args:
        native: which one.
        link: what a message of this rank costs, where its link is imitated in user space.
    """

    ddp_exchanges = True

    def __init__(self, native: Native, link: LinkCost | None = None) -> None:
        super().__init__(wrap_with(link))
        self._meters: list[CommunicationMeter] = []
        self.name = native.name
        self.ddp_options = native.ddp_options
        self._native = native
        self._link = link

    @override
    def attach(
        self,
        ddp: DistributedDataParallel | ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        adopted: Adopted,
    ) -> NativeSession | None:
        assert isinstance(ddp, DistributedDataParallel), "as `takes_shards` says"
        if optimizer is None:
            return None
        meter = CommunicationMeter(dist.get_world_size(), self._link)
        self._meters.append(meter)
        return self._native.couple(ddp, optimizer, meter)

    @override
    def backward_ended(self) -> None:
        for meter in self._meters:
            meter.backward_done()

    @override
    def strategy_for_attach(self) -> Strategy:
        raise ConfigError(
            f"{self.name} works with DistributedDataParallel only, and the script calls"
            " offbeat.attach; choose allreduce, which exchanges the same"
        )


def step_time(record: RunDirectory, rank: int) -> StepTimeEmulator:
    """What makes the steps of `rank` as long as the cluster says."""
    emulation = emulation_of(record)
    by_sleeping = emulation is not None and emulation.speeds == "sleeping"
    return StepTimeEmulator(cluster_of(record.config), rank, by_sleeping=by_sleeping)


def script_recipe(recipe: Strategy, link: LinkCost | None = None) -> ScriptRecipe:
    """What puts `recipe` into a script."""
    if isinstance(recipe, Native):
        return NativeRecipe(recipe, link)
    return StrategyRecipe(recipe, wrap_with(link))
