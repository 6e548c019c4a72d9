"""What the ranks of `test_dispatch_ranks.py` do. Each function runs in every process and returns
JSON.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from gradient_jobs import fingerprint

import offbeat
from offbeat.errors import OffbeatError
from offbeat.megabatch.loader import DispatchLoader
from offbeat.session.session import Session

NUM_SAMPLES = 103


class Numbers(torch.utils.data.Dataset):
    """Sample i is a vector drawn from i, a target, and i itself."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sum(dim=1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def make_net(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[int]:
    """One step; the samples that it was taken with."""
    x, y, indices = batch
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return indices.tolist()


def strategies() -> dict[str, Any]:
    adaptive = offbeat.AdaptiveSGD(mega_batch=40, batch_size=4)
    return {
        "proportional": adaptive,
        "paper": replace(adaptive, rule="paper", min_batch_size=2),
        "hogbatch": replace(adaptive, rule="hogbatch"),
        "momentum": replace(adaptive, merge_momentum=0.5, perturbation=0.1, merge="updates"),
        "elastic": offbeat.ElasticSGD(mega_batch=40, batch_size=4),
    }


def epochs(rank: int, world_size: int) -> dict[str, Any]:
    """Two epochs, the last rank waiting eight times as long over a sample as the others."""
    results = {}
    wait_s = 0.0008 if rank == world_size - 1 else 0.0001
    for label, strategy in strategies().items():
        net = make_net(seed=rank)
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            loader = session.loader(Numbers(), seed=3)
            seen, prints, works = [], [], []
            for _ in range(2):
                mine: list[int] = []
                for _ in range(3):
                    for batch in loader.one_mega_batch():
                        mine += step(net, optimizer, batch)
                        time.sleep(wait_s * len(batch[0]))
                    prints.append(fingerprint(net))
                    works.append([asdict(work) for work in loader.last])
                seen.append(mine)
            results[label] = {
                "seen": seen,
                "prints": prints,
                "works": works,
                "epoch": loader.epoch,
                "lr": optimizer.param_groups[0]["lr"],
                "exchanges": session.stats.exchanges,
            }
    return results


def _begin(
    seed: int, *, record: bool = False, replay: Any = None
) -> tuple[torch.nn.Module, Any, Session, DispatchLoader]:
    net = make_net(seed=seed)
    optimizer = sgd(net)
    session = offbeat.attach(net, optimizer, offbeat.AdaptiveSGD(mega_batch=40, batch_size=4))
    loader = session.loader(Numbers(), seed=3, record=record, replay=replay)
    assert isinstance(loader, DispatchLoader)
    return net, optimizer, session, loader


def resumed(rank: int, world_size: int) -> dict[str, Any]:
    """Saved in the middle of a mega-batch, ranks a different number of steps into it; what is seen
    before and after?

    A recording of both parts is replayed straight through: does it end with the same bits?
    """
    net, optimizer, session, loader = _begin(1, record=True)
    with session:
        seen: list[int] = []
        batches = iter(loader)
        for _ in range(1 + rank):
            seen += step(net, optimizer, next(batches))
        states = copy.deepcopy((net.state_dict(), optimizer.state_dict(), session.state_dict()))
        for _ in batches:  # lost, since it was not saved
            optimizer.step()
    net, optimizer, session, loader = _begin(2, record=True)
    with session:
        for target, state in zip((net, optimizer, session), states, strict=True):
            target.load_state_dict(state)
        for batch in loader:
            seen += step(net, optimizer, batch)
        after = fingerprint(net)
        recording = loader.recording
    net, optimizer, session, loader = _begin(1, replay=recording)
    with session:
        for batch in loader:
            step(net, optimizer, batch)
        return {"seen": seen, "print": after, "replayed": fingerprint(net)}


def apart(rank: int, world_size: int) -> str:
    """Saved before a merge on one rank and after it on the other: what does each hear?"""
    net, optimizer, session, loader = _begin(1)
    with session:
        before = copy.deepcopy(session.state_dict())
        for batch in loader.one_mega_batch():
            step(net, optimizer, batch)
        session.load_state_dict(before if rank else session.state_dict())
        try:
            next(iter(loader))
        except OffbeatError as error:
            return str(error)
    return ""


def refused(rank: int, world_size: int, *, fault: str) -> list[str]:
    """Rank 1 alone is wrong. What does everyone hear?"""
    net = make_net()
    strategy = (
        offbeat.AllReduce()
        if fault == "too few"
        else offbeat.AdaptiveSGD(mega_batch=40, batch_size=8)
    )
    dataset: Any = Numbers()
    arguments: dict[str, Any] = {}
    if rank == 1:
        match fault:
            case "length":
                dataset = Numbers(99)
            case "stream":
                dataset = iter([1, 2])
            case "seed":
                arguments["seed"] = 5
            case "memory":
                arguments["max_batch_size"] = 0
    if fault == "bounds":
        strategy = replace(strategy, min_batch_size=4)
        arguments["max_batch_size"] = 2 if rank == 1 else None
    if fault == "too few":
        dataset, arguments["batch_size"] = Numbers(world_size - 1), 3
    with offbeat.attach(net, sgd(net), strategy) as session:
        try:
            session.loader(dataset, **arguments)
        except OffbeatError as error:
            return [type(error).__name__, str(error)]
    return []


def unequal_batches(rank: int, world_size: int) -> dict[str, Any]:
    """Batches of 1 and 9 of ten samples: gradients by ranks, by samples, and of one device."""
    results: dict[str, Any] = {}
    dataset = Numbers(10)
    for weighed in (False, True):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
            x, y, _ = next(iter(session.loader(dataset, batch_size=1 if rank == 0 else 9)))
            if not weighed:  # what it would be without the loader's word
                optimizer.step()
                session.weigh(1)
            torch.nn.functional.mse_loss(net(x), y).backward()
            results[str(weighed)] = [p.grad.flatten().tolist() for p in net.parameters()]
            results["sizes"] = len(x)
    alone = make_net()
    torch.nn.functional.mse_loss(alone(dataset.x), dataset.y).backward()
    results["alone"] = [p.grad.flatten().tolist() for p in alone.parameters()]
    return results


def lockstep(rank: int, world_size: int) -> dict[str, Any]:
    """An epoch of unequal batches in step, resumed in the middle."""
    net = make_net()
    optimizer = sgd(net)
    seen: list[int] = []
    sizes: list[int] = []
    with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
        loader = session.loader(Numbers(), batch_size=2 + 5 * rank)
        state: dict[str, Any] = {}
        for number, batch in enumerate(loader):
            sizes.append(len(batch[0]))
            seen += step(net, optimizer, batch)
            if number == 2:
                state = copy.deepcopy(session.state_dict())
        session.load_state_dict(state)
        again = [index for batch in loader for index in step(net, optimizer, batch)]
        return {
            "seen": seen,
            "sizes": sizes,
            "again": again,
            "steps": len(loader),
            "print": fingerprint(net),
        }


def idle(rank: int, world_size: int) -> list[list[float]]:
    """Rank 0 has ten samples; the others have none in this step, and no weight. The gradient, and
    that of ten alone.
    """
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    dataset = Numbers(10)
    with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
        session.weigh(4)
        torch.nn.functional.mse_loss(net(dataset.x), dataset.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            session.weigh(10)
            torch.nn.functional.mse_loss(net(dataset.x), dataset.y).backward()
        else:
            session.join()
        got = torch.cat([p.grad.flatten() for p in net.parameters()]).tolist()
    alone = make_net()
    torch.nn.functional.mse_loss(alone(dataset.x), dataset.y).backward()
    return [got, torch.cat([p.grad.flatten() for p in alone.parameters()]).tolist()]


def drawn_together(rank: int, world_size: int) -> dict[str, float]:
    """CROSSBOW's step against the same done in one process: the largest difference, and how far
    models are apart.
    """
    strategy = offbeat.Crossbow(period=2, alpha=0.4, centre_momentum=0.3)
    net = make_net()
    optimizer = sgd(net)
    nets = [make_net() for _ in range(world_size)]
    optimizers = [sgd(other) for other in nets]
    central = [p.detach().clone() for p in nets[0].parameters()]
    moved = [torch.zeros_like(p) for p in central]
    data = Numbers()
    with offbeat.attach(net, optimizer, strategy):
        for number in range(6):
            chosen = [
                slice(10 * number + 3 * other, 10 * number + 3 * other + 3)
                for other in range(world_size)
            ]
            torch.nn.functional.mse_loss(net(data.x[chosen[rank]]), data.y[chosen[rank]]).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls = [
                [0.4 * (p.detach() - z) for p, z in zip(other.parameters(), central, strict=True)]
                for other in nets
            ]
            for other, opt, part in zip(nets, optimizers, chosen, strict=True):
                torch.nn.functional.mse_loss(other(data.x[part]), data.y[part]).backward()
                opt.step()
                opt.zero_grad()
            if number % 2:
                for other, pull in zip(nets, pulls, strict=True):
                    for p, by in zip(other.parameters(), pull, strict=True):
                        p.detach().sub_(by)
                for position, (z, v) in enumerate(zip(central, moved, strict=True)):
                    v.mul_(0.3).add_(sum(pull[position] for pull in pulls))
                    z.add_(v)
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    expected = torch.cat([p.detach().flatten() for p in nets[rank].parameters()])
    return {"error": float((mine - expected).abs().max())}
