"""Puts a run's recipe, which is one of offbeat's strategies or one that torch ships, to work on a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from offbeat.run.step_recorder import AttachedModel
from offbeat.session.attach import attach_through
from offbeat.session.session import Session
from offbeat.transport.driver import Driver
from offbeat_lab.cluster import Cluster
from offbeat_lab.emulation.delaying import Delaying, Delivery
from offbeat_lab.native import CommunicationMeter, Native, NativeSession
from offbeat_lab.options import Recipe

LinkDelay: TypeAlias = Callable[[Delivery], float]
"""How long a delivery occupies a rank's link, in seconds."""


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

    def weigh(self, num_samples: int) -> None:
        """The coming gradient is the mean over so many samples, and counts as many times."""
        assert isinstance(self.session, Session), "torch's strategies weigh all ranks alike"
        self.session.weigh(num_samples)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass, with whatever exchange belongs to it."""
        loss.backward()
        if isinstance(self.session, NativeSession):
            self.session.meter.backward_done()

    def log(self, values: Mapping[str, float]) -> None:
        """Tell whoever hears metrics while training runs."""
        if isinstance(self.session, Session):
            self.session.log(**values)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale gradients down to at most `max_norm`, after `backward`."""
        if isinstance(self.session, Session):
            self.session.clip_grad_norm_(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def averaged_model(self) -> nn.Module:
        """The model to evaluate: where replicas differ on purpose, their mean. Collective unless
        the session averages alone.
        """
        if isinstance(self.session, Session) and self.session.strategy.replicas_differ:
            return self.session.averaged_model()
        return self.model

    @property
    def averaged_without(self) -> frozenset[int]:
        """The living ranks whose models the latest `averaged_model` lacks."""
        return self.session.averaged_without if isinstance(self.session, Session) else frozenset()


def attach_recipe(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    world_size: int,
    cluster: Cluster | None = None,
) -> TaskModel:
    """Attach `recipe`. Collective.

    Args:
        recipe: of the run.
        model: the task's.
        optimizer: of its parameters.
        rank, world_size: of this process.
        cluster: whose links are imitated in user space; None where they are real, or the kernel's.

    Raises:
        OffbeatError: the recipe cannot work with this model, or the ranks do not find each other.
    """
    delay = None if cluster is None else link_delay(cluster, rank)
    if isinstance(recipe, Native):
        meter = CommunicationMeter(world_size, rank=rank, delay=delay)
        native = recipe.attach(model, optimizer, meter)
        return TaskModel(
            model=model, module=native.module, optimizer=native.optimizer, session=native
        )
    # The lab measures averaged models while the session stands, and uses none afterwards.
    session = attach_through(wrap_with(delay), model, optimizer, recipe, finish="keep")
    return TaskModel(model=model, module=model, optimizer=optimizer, session=session)


def wrap_with(delay: LinkDelay | None) -> Callable[[Driver], Driver]:
    """What `attach_through` is to put around the driver, where links are imitated in user space."""
    return (lambda driver: driver) if delay is None else (lambda driver: Delaying(driver, delay))


def link_delay(cluster: Cluster, rank: int) -> LinkDelay:
    """That of the link of `rank` in `cluster`."""
    link = cluster.link_of(rank)
    return lambda delivery: (
        delivery.num_messages * link.latency_s + delivery.num_bytes / link.bytes_per_s
    )
