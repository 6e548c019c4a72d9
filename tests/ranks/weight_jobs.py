"""What the ranks of `test_weight_ranks.py` do. Each function runs in every process and returns
JSON.
"""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import torch
from gradient_jobs import data, fingerprint, flat

import offbeat
from offbeat.errors import OffbeatError, PeerError
from offbeat.planning.topologies import exponential_peers, ring_weights
from offbeat.strategies.averaging import AveragingStrategy

NUM_STEPS = 7


def strategies(world_size: int) -> dict[str, AveragingStrategy]:
    return {
        "localsgd": offbeat.LocalSGD(period=3),
        "localsgd in every step": offbeat.LocalSGD(period=1),
        "post-local sgd": offbeat.LocalSGD(period=2, start_step=3),
        "averaged momentum": offbeat.LocalSGD(period=2, optimizer_state="averaged"),
        "diloco": offbeat.LocalSGD(period=2, outer="diloco"),
        "dpsgd": offbeat.DPSGD(),
        "sgp": offbeat.SGP(),
        "sgp to everyone": offbeat.SGP(out_degree=max(world_size - 1, 1)),
    }


def weighed_start_phase(rank: int, world_size: int) -> float:
    """One step of post-local SGD in its start phase, with 1 sample here and 3 on the other rank."""
    weight = torch.nn.Parameter(torch.zeros(()))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(start_step=1)) as session:
        session.weigh(1 + 2 * rank)
        (weight * 4.0 * rank).backward()
        applied = float(weight.grad) if weight.grad is not None else float("nan")
        optimizer.step()
    assert weight.item() == -applied
    return applied


def make_net(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 5),
        torch.nn.Linear(5, 3),
    )


def sgd(net: torch.nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    x, y = data(rank, step)
    torch.nn.functional.mse_loss(net(x), y).backward()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()


class Reference:
    """All ranks in one process, plainly: what the papers say, with no part of offbeat's but the
    graphs.
    """

    def __init__(self, world_size: int) -> None:
        self.nets = [make_net(seed=0) for _ in range(world_size)]
        self.optimizers = [sgd(net) for net in self.nets]
        self.anchor = [p.detach().clone() for p in self.nets[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.anchor]
        self.weights = [1.0] * world_size

    def vectors(self) -> list[list[torch.Tensor]]:
        """Each rank's parameters and running statistics: the tensors themselves."""
        return [
            [t.detach() for t in net.state_dict(keep_vars=True).values() if t.is_floating_point()]
            for net in self.nets
        ]

    def mix(self, matrix: torch.Tensor) -> list[list[torch.Tensor]]:
        """Row i: the sum over j of matrix[i, j] times rank j's vector."""
        stacked = [torch.stack(tensors).double() for tensors in zip(*self.vectors(), strict=True)]
        return [
            [torch.tensordot(row, tensors, dims=1) for tensors in stacked]
            for row in matrix.double()
        ]

    def write(self, vectors: list[list[torch.Tensor]]) -> None:
        for mine, new in zip(self.vectors(), vectors, strict=True):
            for tensor, value in zip(mine, new, strict=True):
                tensor.copy_(value)

    def average(self) -> None:
        world_size = len(self.nets)
        self.write(self.mix(torch.full((world_size, world_size), 1 / world_size)))

    def step(self, strategy: AveragingStrategy, step: int) -> None:
        world_size = len(self.nets)
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            backward(net, rank, step)
        if isinstance(strategy, offbeat.LocalSGD) and step < strategy.start_step:
            for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(dim=0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        neighbours = torch.zeros(world_size, world_size)
        for rank in range(world_size):
            for peer, weight in ring_weights(rank, world_size).items():
                neighbours[rank, peer] = weight
        mixed = self.mix(neighbours - torch.eye(world_size))
        for optimizer in self.optimizers:
            optimizer.step()
        match strategy:
            case offbeat.LocalSGD():
                num_local = step + 1 - strategy.start_step
                if num_local > 0 and num_local % strategy.period == 0:
                    self.average()
                    self.after_average(strategy)
            case offbeat.DPSGD():
                self.write(
                    [
                        [t + change for t, change in zip(*pair, strict=True)]
                        for pair in zip(self.vectors(), mixed, strict=True)
                    ]
                )
            case offbeat.SGP():
                matrix = torch.zeros(world_size, world_size)
                for rank in range(world_size):
                    targets = exponential_peers(
                        rank, world_size, round_number=step, out_degree=strategy.out_degree
                    ).targets
                    matrix[[rank, *targets], rank] = 1 / (1 + len(targets))
                self.write(self.mix(matrix))

    def after_average(self, strategy: offbeat.LocalSGD) -> None:
        if strategy.outer == "diloco":
            for i, parameters in enumerate(
                zip(*(net.parameters() for net in self.nets), strict=True)
            ):
                change = self.anchor[i] - parameters[0].detach()
                self.momentum[i] = 0.9 * self.momentum[i] + change
                self.anchor[i] = self.anchor[i] - 0.7 * (change + 0.9 * self.momentum[i])
                for parameter in parameters:
                    parameter.detach().copy_(self.anchor[i])
        if strategy.optimizer_state == "averaged":
            for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
                buffers = [
                    o.state[p]["momentum_buffer"]
                    for o, p in zip(self.optimizers, parameters, strict=True)
                ]
                mean = torch.stack(buffers).mean(dim=0)
                for buffer in buffers:
                    buffer.copy_(mean)


def apart(left: torch.nn.Module, right: torch.nn.Module) -> float:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def against_the_paper(rank: int, world_size: int) -> dict[str, Any]:
    """By strategy: how far this rank's model is from the reference's after each step, and the model
    as text.
    """
    results = {}
    for label, strategy in strategies(world_size).items():
        reference = Reference(world_size)
        net = make_net(seed=rank)  # attach must copy rank 0's
        optimizer = sgd(net)
        errors, prints = [], []
        with offbeat.attach(net, optimizer, strategy) as session:
            for step in range(NUM_STEPS):
                train(net, optimizer, rank, range(step, step + 1))
                reference.step(strategy, step)
                errors.append(apart(net, reference.nets[rank]))
                prints.append(fingerprint(net))
            stats = session.stats
        results[label] = {
            "errors": errors,
            "prints": prints,
            "bytes_sent": stats.bytes_sent,
            "exchanges": stats.exchanges,
        }
    return results


def like_allreduce(rank: int, world_size: int) -> float:
    """How far local SGD that averages in every step is from S-SGD, for an optimizer that is linear
    in the gradient.
    """
    nets = []
    for strategy in (offbeat.LocalSGD(period=1, buffers="local"), offbeat.AllReduce()):
        net = make_net()
        optimizer = sgd(net, momentum=0.0)
        with offbeat.attach(net, optimizer, strategy):
            train(net, optimizer, rank, range(5))
        nets.append(net)
    return max(
        float((a - b).detach().abs().max())
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    )


def mean_kept(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks whose weights are apart take steps of length 0. Flat weights before and after, by
    strategy and type.
    """
    results = {}
    for label, strategy in strategies(world_size).items():
        if label == "diloco":
            continue
        for dtype in (torch.float32, torch.bfloat16):
            net = make_net().to(dtype)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            with offbeat.attach(net, optimizer, strategy):
                generator = torch.Generator().manual_seed(rank)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype))
                before = flat(list(net.parameters()))
                for _ in range(6):
                    optimizer.step()
                after = flat(list(net.parameters()))
            results[f"{label}, {dtype}"] = {"before": before.tolist(), "after": after.tolist()}
    return results


def averaged_model(rank: int, world_size: int) -> dict[str, Any]:
    """By strategy: this rank's weights and buffers, and the averaged model's."""
    results = {}
    for label, strategy in {**strategies(world_size), "allreduce": offbeat.AllReduce()}.items():
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(4))
            if rank == 0:
                net(data(rank, 9)[0])  # one more batch seen than the others
            own = net.state_dict()
            own = {name: tensor.double().flatten().tolist() for name, tensor in own.items()}
            averaged = session.averaged_model().state_dict()
            train(net, optimizer, rank, range(4, 6))
        results[label] = {
            "own": own,
            "averaged": {n: t.double().flatten().tolist() for n, t in averaged.items()},
        }
    return results


def resumed(rank: int, world_size: int) -> dict[str, bool]:
    """By strategy: does a run that was saved in the middle of a period end as one that never
    stopped?
    """
    results = {}
    for label, strategy in strategies(world_size).items():
        straight = make_net()
        optimizer = sgd(straight)
        with offbeat.attach(straight, optimizer, strategy) as session:
            train(straight, optimizer, rank, range(4))
            states = copy.deepcopy(
                (straight.state_dict(), optimizer.state_dict(), session.state_dict())
            )
            train(straight, optimizer, rank, range(4, NUM_STEPS))
        second = make_net(seed=5)
        optimizer = sgd(second)
        with offbeat.attach(second, optimizer, strategy) as session:
            for target, state in zip((second, optimizer, session), states, strict=True):
                target.load_state_dict(state)
            train(second, optimizer, rank, range(4, NUM_STEPS))
        results[label] = fingerprint(second) == fingerprint(straight)
    return results


def nonfinite(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's gradient is NaN in step 2, and rank 0 has no batch in step 3."""
    results = {}
    for label, strategy in strategies(world_size).items():
        if label == "post-local sgd":
            continue  # skips together with the others as long as gradients are exchanged
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(2))
            backward(net, rank, 2)
            if rank == 1:
                net[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            if rank != 0:
                backward(net, rank, 3)
            optimizer.step()
            optimizer.zero_grad()
            train(net, optimizer, rank, range(4, 7))
            finite = all(bool(p.isfinite().all()) for p in net.parameters())
            results[label] = {
                "finite": finite,
                "skipped": session.stats.skipped_steps,
                "steps": session.stats.steps,
            }
    return results


def uneven_optimizer_state(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 0 uses the last layer, so only it has a momentum there; all average their
    optimizers' states with Adam.
    """
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with offbeat.attach(net, optimizer, offbeat.LocalSGD(period=2, optimizer_state="averaged")):
        for step in range(2):
            x, _ = data(rank, step)
            (net(x) if rank == 0 else net[:4](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        used = {name: "exp_avg" in optimizer.state.get(p, {}) for name, p in net.named_parameters()}
        moments = flat([optimizer.state[p]["exp_avg_sq"] for p in net[:4].parameters()]).tolist()
        train(net, optimizer, rank, range(2, 4))
    return {"used": used, "moments": moments, "fingerprint": fingerprint(net)}


def refused(rank: int, world_size: int, *, fault: str) -> dict[str, str]:
    """Something cannot work, on every rank or on rank 1 alone. What does everyone hear?"""
    net = make_net()
    build = {
        "out_degree": lambda: offbeat.SGP(out_degree=world_size),
        "scaler": lambda: offbeat.DPSGD(),
        "differs": lambda: offbeat.LocalSGD(period=2 if rank == 1 else 3),
    }[fault]
    scaler = torch.amp.GradScaler("cpu") if fault == "scaler" else None
    before = fingerprint(net)
    try:
        offbeat.attach(net, sgd(net), build(), scaler=scaler)
    except OffbeatError as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "touched": str(fingerprint(net) != before),
        }
    return {"kind": "none", "message": "", "touched": ""}


def killed(rank: int, world_size: int) -> list[int | None]:
    """The last rank is killed between steps, once for all strategies. Whom do the others blame,
    strategy by strategy?
    """
    net = make_net()
    optimizer = sgd(net)
    try:
        with offbeat.attach(net, optimizer, offbeat.SGP()):
            train(net, optimizer, rank, range(2))
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(net, optimizer, rank, range(2, 6))
    except PeerError as error:
        return [error.rank]
    return [None]
