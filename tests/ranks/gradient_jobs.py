"""What the ranks of `test_gradient_ranks.py` do. Each function runs in every process and returns
JSON.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.errors import OffbeatError, PeerError
from offbeat.strategies import REGISTRY


def for_each(
    rank: int, world_size: int, *, job: str, strategies: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Run one of the jobs below with several strategies, one after the other in the
    same processes.
    """
    run = globals()[job]
    return {
        label: run(rank, world_size, name=name, options=options)
        for label, (name, options) in strategies.items()
    }


def make_net(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 3),
    )


def make_strategy(name: str, options: dict[str, Any]) -> Any:
    return REGISTRY[name](**options)


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn((4, 6), generator=generator), torch.randn((4, 3), generator=generator)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return torch.nn.functional.mse_loss(model(x), y)


def fingerprint(model: torch.nn.Module) -> str:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def against_ddp(
    rank: int, world_size: int, *, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Train with offbeat and with DDP on the same data; how far apart are the parameters?"""
    mine = make_net(seed=rank)  # attach must copy rank 0's
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    with offbeat.attach(mine, optimizer, make_strategy(name, options)) as session:
        train(mine, optimizer, rank, range(5))
        bytes_sent = session.stats.bytes_sent
    theirs = make_net(seed=0)
    ddp = DistributedDataParallel(theirs)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), rank, range(5))
    apart = max(
        float((a - b).detach().abs().max())
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )
    return {"apart": apart, "fingerprint": fingerprint(mine), "bytes_sent": bytes_sent}


def conservation(
    rank: int, world_size: int, *, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Over some steps: everything applied, owed and computed, as flat lists, for the test to add up
    over ranks.
    """
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = make_net()
    applied = computed = torch.zeros(
        sum(p.numel() for p in model.parameters()), dtype=torch.float64
    )
    with offbeat.attach(model, optimizer, make_strategy(name, options)) as session:
        for step in range(4):
            loss_of(model, rank, step).backward()
            loss_of(plain, rank, step).backward()
            applied = applied + flat([p.grad for p in model.parameters()])
            computed = computed + flat([p.grad for p in plain.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
        state = session.state_dict()["parts"]["gradients"]["additive"]
    owed = flat([state[f"residual/{key}"] for key, _ in model.named_parameters()])
    return {"applied": applied.tolist(), "owed": owed.tolist(), "computed": computed.tolist()}


def flat(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([torch.zeros(0) if t is None else t.reshape(-1) for t in tensors]).double()


def uneven_use(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """In step 1 the last rank uses only part of the model; in step 2 it runs no backward at all."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = rank == world_size - 1
    with offbeat.attach(model, optimizer, make_strategy(name, options)) as session:
        train(model, optimizer, rank, range(1))
        if last:
            model[0](data(rank, 1)[0]).sum().backward()
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


def attach_error(rank: int, world_size: int, *, fault: str) -> dict[str, Any]:
    """Rank 1 builds something else than the others. What does everyone hear?"""
    odd = rank == 1
    model = torch.nn.Linear(6, 4 if odd and fault == "model" else 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if odd and fault == "lr" else 0.1)
    if odd and fault == "optimizer":
        optimizer = torch.optim.LBFGS(model.parameters())
    if odd and fault == "interface":
        os.environ["OFFBEAT_INTERFACE"] = "no-such-interface"
    strategy = offbeat.GTopK(density=0.5 if odd and fault == "strategy" else 0.1)
    try:
        offbeat.attach(model, optimizer, strategy)
    except OffbeatError as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none", "message": ""}


def nonfinite(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1's gradient is NaN in step 2."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, make_strategy(name, options)) as session:
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


def exception_in_backward(
    rank: int, world_size: int, *, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Rank 1 raises inside backward in step 1; everyone catches what comes and goes on."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = ""
    with offbeat.attach(model, optimizer, make_strategy(name, options)) as session:
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


def exception_in_the_loop(
    rank: int, world_size: int, *, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Rank 1 raises between steps, which ends its session. What do the others hear?"""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, make_strategy(name, options)):
            train(model, optimizer, rank, range(2))
            if rank == 1:
                raise ValueError("the data set ran dry")
            train(model, optimizer, rank, range(2, 6))
    except (ValueError, PeerError) as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}


def killed(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The last rank is killed between steps. What do the others hear?"""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, make_strategy(name, options)):
            train(model, optimizer, rank, range(2))
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, rank, range(2, 6))
    except PeerError as error:
        return {"blamed": error.rank, "message": str(error)}
    return {"blamed": None, "message": ""}


def gan(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two models, two sessions, and a loss that runs through both."""
    generator, critic = make_net(1), torch.nn.Linear(3, 1)
    torch.manual_seed(5)
    generator_opt = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
    strategy = make_strategy(name, options)
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


def subgroup(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two halves of the world train apart from each other."""
    halves = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
    groups = [dist.new_group(half) for half in halves]
    mine = int(rank >= world_size // 2)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(
        model, optimizer, make_strategy(name, options), group=groups[mine]
    ) as session:
        train(model, optimizer, rank, range(3))
        return {"fingerprint": fingerprint(model), "world_size": session.world_size, "half": mine}


def more_passes_on_one_rank(
    rank: int, world_size: int, *, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Rank 1 runs one synchronised backward pass too many."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, make_strategy(name, options)):
            train(model, optimizer, rank, range(1))
            for _ in range(2 if rank == 1 else 1):
                loss_of(model, rank, 1).backward()
            optimizer.step()
            if rank != 1:
                return {"heard": "", "message": ""}
    except OffbeatError as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}


def diverged(rank: int, world_size: int, *, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 changes a parameter behind the session's back."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, make_strategy(name, options)):
            train(model, optimizer, rank, range(1))
            if rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] += 1e-6
            train(model, optimizer, rank, range(1, 3))
    except OffbeatError as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}
