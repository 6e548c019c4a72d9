"""What can befall a strategy that exchanges gradients, as jobs of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import PeerError
from offbeat.strategies.base import Strategy
from rank_jobs.regression import data, fingerprint, loss_of, make_net, train


def for_each(
    rank: int, world_size: int, *, job: Callable[..., Any], strategies: dict[str, Strategy]
) -> dict[str, Any]:
    """Run `job(rank, world_size, strategy=...)` with several strategies, one after the other in the
    same processes.
    """
    return {
        label: job(rank, world_size, strategy=strategy) for label, strategy in strategies.items()
    }


def uneven_use(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """In step 1 the last rank uses only part of the model; in step 2 it runs no backward at all."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = rank == world_size - 1
    with offbeat.attach(model, optimizer, strategy) as session:
        train(model, optimizer, rank, range(1))
        if last:
            model[0](data(rank, 1)[0]).mean().backward()
        else:
            loss_of(model, rank, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not last:
            loss_of(model, rank, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rank, range(3, 5))
        return {"fingerprint": fingerprint(model), "exchanges": session.stats.exchanges}


def uneven_closures(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """In step 1 the last rank's closure runs no backward pass."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy) as session:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                if step != 1 or rank != world_size - 1:
                    loss.backward()
                return loss

            optimizer.step(closure)
        return {"fingerprint": fingerprint(model), "exchanges": session.stats.exchanges}


def nonfinite(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """Rank 1's gradient is NaN in step 2."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy) as session:
        train(model, optimizer, rank, range(2))
        before = fingerprint(model)
        (loss_of(model, rank, 2) * (float("nan") if rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        untouched = fingerprint(model) == before
        train(model, optimizer, rank, range(3, 5))
        return {
            "fingerprint": fingerprint(model),
            "untouched": untouched,
            "skipped": session.stats.skipped_steps,
        }


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no memory left")


def exception_in_backward(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """Rank 1 raises inside backward in step 1; everyone catches what comes and goes on."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = ""
    with offbeat.attach(model, optimizer, strategy) as session:
        train(model, optimizer, rank, range(1))
        try:
            if rank == 1:
                torch.nn.functional.mse_loss(
                    model[2:](Explode.apply(model[:2](data(rank, 1)[0]))), data(rank, 1)[1]
                ).backward()
            else:
                loss_of(model, rank, 1).backward()
            optimizer.step()
        except (MemoryError, PeerError) as error:
            heard = type(error).__name__
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rank, range(2, 4))
        return {
            "fingerprint": fingerprint(model),
            "heard": heard,
            "exchanges": session.stats.exchanges,
        }


def exception_in_the_loop(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """Rank 1 raises between steps, which ends its session. What do the others hear?"""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, strategy):
            train(model, optimizer, rank, range(2))
            if rank == 1:
                raise ValueError("the data set ran dry")
            train(model, optimizer, rank, range(2, 6))
    except (ValueError, PeerError) as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}


def killed(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """The last rank is killed between steps. What do the others hear?"""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, strategy):
            train(model, optimizer, rank, range(2))
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, rank, range(2, 6))
    except PeerError as error:
        return {"blamed": error.rank, "message": str(error)}
    return {"blamed": None, "message": ""}


def gan(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """Two models, two sessions, and a loss that runs through both."""
    generator, critic = make_net(1), torch.nn.Linear(3, 1)
    torch.manual_seed(5)
    generator_opt = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
    with (
        offbeat.attach(generator, generator_opt, strategy),
        offbeat.attach(critic, critic_opt, strategy),
    ):
        for step in range(3):
            x, y = data(rank, step)
            (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
            critic_opt.step()
            critic_opt.zero_grad()
            (-critic(generator(x)).mean()).backward()
            generator_opt.step()
            generator_opt.zero_grad()
            critic_opt.zero_grad()
    return {"fingerprint": fingerprint(generator) + fingerprint(critic)}


def subgroup(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """Two halves of the world train apart from each other."""
    halves = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
    groups = [dist.new_group(half) for half in halves]
    mine = int(rank >= world_size // 2)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy, group=groups[mine]) as session:
        train(model, optimizer, rank, range(3))
        return {"fingerprint": fingerprint(model), "world_size": session.world_size, "half": mine}
