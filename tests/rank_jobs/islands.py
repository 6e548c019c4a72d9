"""What ranks of islands do: 2 replicas, each divided by `fully_shard` among 2 ranks."""

from __future__ import annotations

import os
import runpy
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import offbeat
from conformance_support.lent import lent
from offbeat.errors import OffbeatError, PeerError
from offbeat.membership.island import Island
from offbeat.strategies.base import Strategy
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from offbeat.transport.link import SILENCE_VARIABLE
from ranks_support.process import ask_for, launcher_environment, pause

SHARDS = 2

SECRET = "the secret of this run alone"

SILENCE_S = 2.0
"""The limit where a rank is stopped."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Attributes:
        strategy: by which.
        optimizer: the name of its class in torch.optim.
        options: of the optimizer.
        num_steps: steps.
        num_passes: backward passes in a step; all but the last one accumulate.
        by_fsdp: whether they accumulate whole gradients, as FSDP does where it is told not to
            bring them together; else they are inside `no_sync`.
        clip: by what gradients are clipped: "torch", "session", or nothing.
        reshard: as `reshard_after_forward`.
        half: whether FSDP computes in bfloat16.
        offload: whether shards lie on the host between passes, which they do here anyway.
    """

    strategy: Strategy
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02, "momentum": 0.9})
    num_steps: int = 5
    num_passes: int = 1
    by_fsdp: bool = False
    clip: str = ""
    reshard: bool = True
    half: bool = False
    offload: bool = False


class Block(torch.nn.Module):
    """A part of a transformer, with attention over a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mixed = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.norm(x)).chunk(3, dim=-1)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.nn.Sequential:
    """A transformer whose parameters have uneven numbers of rows, and some a single one."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        Block(7),
        torch.nn.Linear(7, 1),
        torch.nn.Softplus(),  # FSDP warns of a root that returns a view, as Linear does
    ).to(dtype)


@cache
def make_mesh(world_size: int, num_shards: int = SHARDS) -> DeviceMesh:
    """One for all that a process trains: groups of gloo take long to connect."""
    return init_device_mesh(
        "cpu", (world_size // num_shards, num_shards), mesh_dim_names=("replicate", "shard")
    )


def shard(model: torch.nn.Sequential, mesh: DeviceMesh, how: Training | None = None) -> None:
    how = how or Training(strategy=offbeat.AllReduce())
    options: dict[str, Any] = {
        "mesh": mesh["shard"],
        "reshard_after_forward": how.reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if how.offload else OffloadPolicy(),
    }
    if how.half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, **options)
    fully_shard(model, **options)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of the batch that `rank` has in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn((3, 4, 5), generator=generator, dtype=torch.float64).to(dtype)
    return (model(x) - x.abs().sum(dim=-1, keepdim=True)).square().mean()


@torch.no_grad()
def loss_now(model: torch.nn.Module) -> float:
    """The same on all ranks if they have the same model."""
    return float(loss_of(model, 0, 1000))


def make_optimizer(model: torch.nn.Module, how: Training) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, how.optimizer)(
        model.parameters(), **how.options
    )
    return optimizer


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    session: offbeat.Session,
    how: Training,
    ranks: list[int],
    steps: range,
) -> None:
    """`ranks`: whose batches make this rank's gradient, by their mean."""
    for step in steps:
        for number in range(how.num_passes):
            is_last = number == how.num_passes - 1
            by_fsdp = how.by_fsdp and isinstance(model, FSDPModule)
            if by_fsdp:
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or by_fsdp else session.no_sync():
                batch = step * how.num_passes + number
                sum(loss_of(model, rank, batch) / len(ranks) for rank in ranks).backward()  # type: ignore[union-attr]  # no number
        if how.clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif how.clip == "session":
            session.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module) -> torch.Tensor:
    """All parameters of a model side by side. Collective in an island."""
    return torch.cat([full(parameter.detach()).reshape(-1) for parameter in model.parameters()])


def for_each(
    rank: int,
    world_size: int,
    *,
    job: Callable[..., Any],
    trainings: dict[str, Training],
    **arguments: Any,
) -> dict[str, Any]:
    """Run a job with one way to train after the other."""
    return {label: job(rank, world_size, how=how, **arguments) for label, how in trainings.items()}


def in_turn(rank: int, world_size: int, *, jobs: dict[str, list[Any]]) -> dict[str, Any]:
    """What comes of each job, one after the other. A job is a function and its arguments."""
    return {name: job(rank, world_size, **arguments) for name, (job, arguments) in jobs.items()}


def against_whole(rank: int, world_size: int, *, how: Training) -> dict[str, Any]:
    """Train by islands, and then each replica whole. How far apart are the parameters?"""
    mesh = make_mesh(world_size)
    model = make_model(seed=1 + rank // SHARDS)  # attach copies the first island's
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        train(model, optimizer, session, how, [rank], range(how.num_steps))
    mine = whole(model)
    reference = make_model()
    stepped = make_optimizer(reference, how)
    island = rank // SHARDS * SHARDS
    group = mesh["replicate"].get_group()
    with offbeat.attach(reference, stepped, how.strategy, group=group) as session:
        train(reference, stepped, session, how, [island, island + 1], range(how.num_steps))
    theirs = whole(reference)
    moved = theirs - whole(make_model())
    return {
        "apart": float((mine - theirs).norm() / theirs.norm()),
        "moved": float(moved.norm() / theirs.norm()),
        "bits": mine.numpy().tobytes().hex(),
    }


def trained(rank: int, world_size: int, *, how: Training) -> dict[str, Any]:
    """Train by islands. What is this rank's replica, and what was decided on the way?"""
    mesh = make_mesh(world_size)
    model = make_model(torch.float32)
    shard(model, mesh, how)
    first = loss_now(model)
    optimizer = make_optimizer(model, how)
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        with patch.object(Island, "gather", autospec=True, side_effect=Island.gather) as gather:
            train(model, optimizer, session, how, [rank], range(how.num_steps))
        asked = gather.call_count
        said = [each.state_dict().get("replicated", {}) for each in session.callbacks]
        seen = session.rank, session.world_size, session.gather(rank)
        if how.strategy.replicas_differ:
            session.finish()
    replica = whole(model)
    return {
        "bits": replica.numpy().tobytes().hex(),
        "messages": asked,
        "decided": repr([{k: v for k, v in each.items() if "/" not in k} for each in said]),
        "seen": seen,
        "losses": [first, loss_now(model)],
    }


def poisoned(rank: int, world_size: int, *, how: Training) -> dict[str, Any]:
    """In the third step the gradient of one shard of one island is not finite."""
    mesh = make_mesh(world_size)
    model = make_model()
    shard(model, mesh, how)
    step = -1

    def poison(parameter: Any) -> None:
        if step == 2 and rank == world_size - 1:
            parameter.grad.to_local().fill_(float("nan"))

    model[2].weight.register_post_accumulate_grad_hook(poison)
    model[1].mixed.weight.register_post_accumulate_grad_hook(poison)
    optimizer = make_optimizer(model, how)
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        kept = [whole(model)]
        for step in range(how.num_steps):
            train(model, optimizer, session, how, [rank], range(step, step + 1))
            kept.append(whole(model))
        skipped = session.stats.skipped_steps
    moved = [float((new - old).norm()) for old, new in pairwise(kept)]
    return {"skipped": skipped, "moved": moved, "bits": whole(model).numpy().tobytes().hex()}


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What `attach` says, by what is wrong."""
    mesh = make_mesh(world_size)
    said = {}
    for label, (make, strategy, given) in mistakes(rank, mesh).items():
        model = make_model()
        make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if label != "rate" else 0.1 + rank)
        scaler = torch.amp.GradScaler("cpu") if label == "scaler" and rank == 3 else None
        try:
            offbeat.attach(model, optimizer, strategy, mesh=given, scaler=scaler).close()
        except OffbeatError as error:
            said[label] = f"{type(error).__name__}: {error}"
    return said


Mistakes = dict[str, tuple[Callable[[Any], object], Strategy, Any]]


def mistakes(rank: int, mesh: DeviceMesh) -> Mistakes:
    """By what is wrong: what divides the model, the strategy, and the mesh that is given."""

    def well(model: torch.nn.Sequential) -> None:
        shard(model, mesh)

    def blocks(model: torch.nn.Sequential) -> None:
        fully_shard(model[1], mesh=mesh["shard"])

    def tensors(model: torch.nn.Sequential) -> None:
        parallelize_module(model[0], mesh["shard"], ColwiseParallel())

    def natively(model: torch.nn.Sequential) -> None:
        fully_shard(model, mesh=mesh)

    dense, across = offbeat.AllReduce(), mesh["replicate"]
    others: Mistakes = {
        each.name: (well, each, across)
        for each in (
            offbeat.DPSGD(),
            offbeat.SPDKFAC(),
            offbeat.AdaptiveSGD(),
        )
    }
    return others | {
        "no mesh": (well, dense, None),
        "whole": (lambda model: None, dense, across),
        "blocks": (blocks, dense, across),
        "tensors": (tensors, dense, across),
        "natively": (natively, dense, across),
        "both dimensions": (well, dense, mesh),
        "the other dimension": (well, dense, mesh["shard"]),
        "one rank": (well, offbeat.DPSGD() if rank == 2 else dense, across),
        "scaler": (well, dense, across),
        "rate": (well, dense, across),
        "strategy": (well, offbeat.TopK() if rank % 2 else dense, across),
    }


def rebound(rank: int, world_size: int) -> dict[str, Any]:
    """The memory of shards changes while a session lasts."""
    mesh = make_mesh(world_size)
    how = Training(strategy=lent(offbeat.AllReduce(), replica_check_interval=1))
    model = make_model()
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        train(model, optimizer, session, how, [rank], range(2))
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.to_empty(device="cpu")
        model.load_state_dict(kept)
        before = whole(model)
        train(model, optimizer, session, how, [rank], range(2, 4))
        moved = float((whole(model) - before).norm())
        bits = whole(model).numpy().tobytes().hex()
        model.load_state_dict(kept, assign=True)
        try:
            loss_of(model, rank, 5)
        except OffbeatError as error:
            said = str(error)
        session.close(average=False)
    return {"moved": moved, "bits": bits, "said": said}


def struck(rank: int, world_size: int, *, strategy: Strategy, at: str) -> dict[str, Any]:
    """The last rank is killed or stopped, between steps or within its backward pass, or raises.
    What do the others hear, and when?
    """
    os.environ[SILENCE_VARIABLE] = f"{SILENCE_S:g}"
    mesh = make_mesh(world_size)
    how = Training(strategy=strategy)
    model = make_model()
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    begin_s = 0.0

    def strike(_: Any) -> None:
        if begin_s and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP if "stop" in at else signal.SIGKILL)

    if "backward" in at:
        model[1].mixed.weight.register_post_accumulate_grad_hook(strike)
    try:
        with offbeat.attach(model, optimizer, strategy, mesh=mesh["replicate"]) as session:
            train(model, optimizer, session, how, [rank], range(4))
            begin_s = time.monotonic()
            if rank == world_size - 1:
                dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
            if "step" in at:
                strike(None)
            if at == "raise" and rank == world_size - 1:
                raise ValueError("no more data")
            train(model, optimizer, session, how, [rank], range(4, 12))
    except PeerError as error:
        if "stop" in at:
            store = dist.distributed_c10d._get_default_store()
            if store.add("raised", 1) == world_size - 1:
                os.kill(int(store.get("pid")), signal.SIGKILL)
        return {
            "rank": error.rank,
            "message": str(error),
            "after_s": time.monotonic() - begin_s,
            "before": type(error.__cause__).__name__,
        }
    except ValueError:
        return {}
    return {"rank": None, "message": "", "after_s": 0.0, "before": ""}


def survived(
    rank: int, world_size: int, *, strategy: Strategy, hit: int, how: int
) -> dict[str, Any]:
    """Rank `hit` is sent the signal `how` in a step. What becomes of its island, and of the
    others?
    """
    os.environ[SILENCE_VARIABLE] = f"{SILENCE_S:g}"
    store = dist.distributed_c10d._get_default_store()
    mesh = make_mesh(world_size)
    model = make_model()
    training = Training(strategy=strategy)
    shard(model, mesh, training)
    optimizer = make_optimizer(model, training)
    begin_s, said, longest_s = 0.0, "", 0.0
    try:
        with offbeat.attach(model, optimizer, strategy, mesh=mesh["replicate"]) as session:
            train(model, optimizer, session, training, [rank], range(4))
            if rank == hit:
                store.set("pid", str(os.getpid()))
                os.kill(os.getpid(), how)
            step, begin_s = 4, time.monotonic()
            # The island of the other rank goes on until it has learnt of the loss.
            while time.monotonic() < begin_s + 60:
                pause()
                step_s = time.monotonic()
                train(model, optimizer, session, training, [rank], range(step, step + 1))
                longest_s = max(longest_s, time.monotonic() - step_s)
                step += 1
                heard = any("without worker" in notice for notice in session.notices)
                if max(session._island.gather(int(heard))):
                    break
            train(model, optimizer, session, training, [rank], range(step, step + 3))
    except PeerError as error:
        said = str(error)
    after_s = time.monotonic() - begin_s
    if how == signal.SIGSTOP and store.add("ended", 1) == world_size - 1:
        os.kill(int(store.get("pid")), signal.SIGKILL)
    notices = [notice for notice in session.notices if "without worker" in notice]
    return {"said": said, "after_s": after_s, "longest_s": longest_s, "notices": notices}


def returned(
    rank: int, world_size: int, *, strategy: Strategy, wanted: list[str]
) -> dict[str, Any]:
    """The last island is killed in its fifth step, and its ranks are started anew, one long after
    the other.
    """
    os.environ |= {SECRET_VARIABLE: SECRET, SILENCE_VARIABLE: f"{SILENCE_S:g}"}
    how, mesh = Training(strategy=strategy), make_mesh(world_size)
    model = make_model()
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    with offbeat.attach(model, optimizer, strategy, mesh=mesh["replicate"]) as session:

        def train_until(notice: str, step: int) -> int:
            while True:
                if step == 4 and rank >= SHARDS:
                    os.kill(os.getpid(), signal.SIGKILL)
                heard = any(notice in each for each in session.notices)
                if max(session._island.gather(int(heard))):
                    return step
                pause()
                train(model, optimizer, session, how, [rank], range(step, step + 1))
                step += 1

        step, said = train_until("without worker 2", 0), []
        for number, path in enumerate(wanted):
            said = [*session.notices]
            if rank == 0:
                returning = {RETURN_VARIABLE: "1", SECRET_VARIABLE: SECRET}
                environment = launcher_environment(SHARDS + number, world_size)
                ask_for(path, environment | returning)
            train(model, optimizer, session, how, [rank], range(step, step + 30))
            step += 30
        step = train_until("with worker 2", step)
        train(model, optimizer, session, how, [rank], range(step, step + 20))
    return {"end": whole(model).tolist(), "before": said}


def comes_back(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """What a rank of the island does that comes back."""
    how, mesh = Training(strategy=strategy), offbeat.island_mesh("cpu", SHARDS)
    model = make_model(seed=9)
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    began = whole(model)
    with offbeat.attach(model, optimizer, strategy, mesh=mesh["replicate"]) as session:
        moved = float((whole(model) - began).norm())
        train(model, optimizer, session, how, [session.rank], range(100, 120))
    seen = [session.rank, session.world_size]
    return {"end": whole(model).tolist(), "seen": seen, "moved": moved}


def saved(rank: int, world_size: int, *, how: Training, directory: str) -> dict[str, Any]:
    """Train, and save halfway by `torch.distributed.checkpoint`."""
    mesh = make_mesh(world_size)
    model = make_model()
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    half = how.num_steps // 2
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        train(model, optimizer, session, how, [rank], range(half))
        state = {
            "model": model.state_dict(),
            optimizer_key(rank // SHARDS): get_optimizer_state_dict(model, optimizer),
            "session": session.state_dict(),
        }
        dcp.save(state, checkpoint_id=f"{directory}/{how.strategy.name}")
        at_half = whole(model)
        owed = summed(session)
        own = session.state_dict()
        mine = next(iter(own["shards"]))
        own["shards"] = {f"{mine[:-1]}{1 - int(mine[-1])}": own["shards"][mine]}
        try:
            session.load_state_dict(own)
        except OffbeatError as error:
            said = str(error)
        train(model, optimizer, session, how, [rank], range(half, how.num_steps))
        session.close(average=False)
    return {
        "half": at_half.tolist(),
        "owed": owed,
        "said": said,
        "bits": whole(model).numpy().tobytes().hex(),
    }


def optimizer_key(island: int) -> str:
    """Islands have optimizers of their own where weights are averaged."""
    return f"optimizer of island {island}"


def resumed(
    rank: int, world_size: int, *, how: Training, directory: str, num_shards: int
) -> dict[str, Any]:
    """Go on from what `saved` has saved, with as many shards."""
    mesh = make_mesh(world_size, num_shards)
    model = make_model(seed=7)
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    half = how.num_steps // 2
    key = optimizer_key(rank // num_shards % 2)  # there were two islands
    state = {"model": model.state_dict(), key: get_optimizer_state_dict(model, optimizer)}
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        checkpoint = f"{directory}/{how.strategy.name}"
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        state["session"] = session.state_to_load(metadata)
        dcp.load(state, checkpoint_id=checkpoint)
        set_optimizer_state_dict(model, optimizer, state[key])
        session.load_state_dict(state["session"])
        at_half = whole(model)
        owed = summed(session)
        train(model, optimizer, session, how, [rank], range(half, how.num_steps))
        session.close(average=False)
    return {
        "half": at_half.tolist(),
        "owed": owed,
        "bits": whole(model).numpy().tobytes().hex(),
    }


def summed(session: offbeat.Session) -> list[float]:
    """What all islands owe together, and the anchor of an outer optimizer, as flat vectors."""
    state = session.state_dict()
    (island,) = state["islands"].values()
    entries: list[Any] = [*island.get("gradients", {}).get("additive", {}).items()]
    owed = [value.full_tensor().reshape(-1) for _, value in sorted(entries)]
    anchors = [
        value.full_tensor().reshape(-1)
        for key, value in sorted(state["replicated"].get("periodic_average", {}).items())
        if key.startswith(("anchor", "outer/SGD/momentum"))
    ]
    numbers = torch.cat([*owed, torch.zeros(1)]).tolist()
    by_rank = torch.tensor(session.gather(numbers), dtype=torch.float64)
    total = by_rank.sum(dim=0) / state["num_shards"]
    return [*total.tolist(), *torch.cat([*anchors, torch.zeros(1)]).tolist()]


def averaged(rank: int, world_size: int, *, sharded: bool) -> dict[str, Any]:
    """Models of islands, or of ranks, that differ, and their mean."""
    mesh = make_mesh(world_size)
    how = Training(strategy=offbeat.LocalSGD(period=100, warmup=0))
    model = make_model()
    if sharded:
        shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    given = mesh["replicate"] if sharded else None
    with offbeat.attach(model, optimizer, how.strategy, mesh=given) as session:
        train(model, optimizer, session, how, [rank], range(3))
        mine = whole(model)
        every = torch.tensor(session.gather(mine.tolist()), dtype=torch.float64)
        expected = every.mean(dim=0)
        state: dict[str, Any] = session.averaged_state_dict()
        named = [state[name] for name, _ in model.named_parameters()]
        found = torch.cat([full(value).reshape(-1) for value in named])
        before = loss_now(model)
        with session.averaged_weights():
            within, seen = whole(model), loss_now(model)
        after = loss_now(model)
        reference = make_model()
        start = 0
        with torch.no_grad():
            for parameter in reference.parameters():
                end = start + parameter.numel()
                parameter.copy_(expected[start:end].view(parameter.shape))
                start = end
    return {
        "apart": float((every[0] - every[-1]).norm()),
        "state": float((found - expected).norm()),
        "within": float((within - expected).norm()),
        "loss": abs(seen - loss_now(reference)),
        "kept": before == after,
        "closed": float((whole(model) - expected).norm()),
    }


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor, which may be a DTensor."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def ends_badly(rank: int, world_size: int) -> str:
    """One shard is not finite when training ends. What do the ranks hear?"""
    mesh = make_mesh(world_size)
    how = Training(strategy=offbeat.LocalSGD(period=100, warmup=0))
    model = make_model()
    shard(model, mesh, how)
    optimizer = make_optimizer(model, how)
    try:
        with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
            train(model, optimizer, session, how, [rank], range(3))
            if rank == world_size - 1:
                weight: Any = model[1].mixed.weight
                with torch.no_grad():
                    weight.to_local()[0, 0] = float("inf")
    except OffbeatError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Even(torch.nn.Module):
    """A model whose loss has the same gradient for each of its elements: so all of them have the
    same value, for as long as they are of the same average.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(n, 5, bias=n > 3) for n in (3, 4, 7))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(p.sum() for p in self.parameters())  # type: ignore[assignment]
        return x * total


def mixed(rank: int, world_size: int, *, how: Training) -> dict[str, Any]:
    """Train islands at speeds that vary. Which values are in a replica at the end of each step?"""
    mesh = make_mesh(world_size)
    model = Even().double()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = make_optimizer(model, how)
    island, drawn = rank // SHARDS, torch.Generator().manual_seed(rank // SHARDS)
    seen = []
    with offbeat.attach(model, optimizer, how.strategy, mesh=mesh["replicate"]) as session:
        # The machine decides how many steps there are from one average to the next.
        while (step := len(seen)) < how.num_steps or session.stats.exchanges < 3:
            for _ in range(int(torch.randint(0, 60, (1,), generator=drawn))):
                torch.randn(90, 90) @ torch.randn(90, 90)
            model(torch.tensor(0.1 * (1 + island) + 0.01 * step).double()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(sorted(set(whole(model).tolist())))
        session.load_state_dict(session.state_dict())
        named = session.averaged_tensors()
        mean = [named[name] for name, _ in model.named_parameters()]
        exchanges = session.stats.exchanges
    return {
        "seen": seen,
        "mean": sorted(set(torch.cat([full(p).reshape(-1) for p in mean]).tolist())),
        "exchanges": exchanges,
        "end": sorted(set(whole(model).tolist())),
    }


def example(rank: int, world_size: int, *, arguments: dict[str, Any]) -> float:
    """What the example that is sharded comes to by itself."""
    path = Path(__file__).parents[2] / "examples" / "sharded_gpt.py"
    loss: float = runpy.run_path(str(path))["main"](**arguments)
    return loss
