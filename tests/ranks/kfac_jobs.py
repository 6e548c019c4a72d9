"""What the ranks of `test_kfac_ranks.py` do. Each function runs in every process and
returns JSON.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import gradient_jobs
import torch
from gradient_jobs import fingerprint

import offbeat
from kfac_support.reference import batch_of, loss_of, make_net
from offbeat.kfac.part import KFACPart
from offbeat.session.session import Session
from offbeat.strategies import REGISTRY

Strategies = dict[str, tuple[str, dict[str, Any]]]


def several(
    rank: int, world_size: int, *, calls: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Several jobs, of this file or of `gradient_jobs`, one after the other in the same
    processes.
    """
    results = {}
    for label, (job, arguments) in calls.items():
        results[label] = (globals().get(job) or getattr(gradient_jobs, job))(
            rank, world_size, **arguments
        )
    return results


def part_of(session: Session) -> KFACPart:
    return next(part for part in session._parts if isinstance(part, KFACPart))


def step_(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss_of(model, batch_of(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    rank: int,
    world_size: int,
    *,
    strategies: Strategies,
    steps: int,
    lr: float,
    same_data: bool = False,
) -> dict[str, Any]:
    """Train with several strategies, one after the other."""
    results = {}
    for label, (name, options) in strategies.items():
        model = make_net(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with offbeat.attach(model, optimizer, REGISTRY[name](**options)) as session:
            noted: Counter[str] = Counter()
            for step in range(steps):
                step_(model, optimizer, 0 if same_data else rank, step)
                if (profile := session.take_profile()) is not None:
                    noted = Counter(span.kind for span in profile.spans)
            plan = part_of(session).plan
            state = session.state_dict()["parts"]["kfac"]
            results[label] = {
                "noted": noted,
                "parameters": torch.cat(
                    [p.detach().flatten() for p in model.parameters()]
                ).tolist(),
                "fingerprint": fingerprint(model),
                "owners": plan.owners,
                "num_groups": len(plan.groups),
                "num_kept": sum(
                    t.numel()
                    for kept in state.values()
                    for t in kept.values()
                    if isinstance(t, torch.Tensor)
                ),
                "num_in_memory": sum(
                    factor.weighted_sum.numel()
                    for factor in part_of(session).accumulator.factors.values()
                )
                + sum(
                    kept.numel()
                    for kept in part_of(session).preconditioner.inverses.packed
                    if kept is not None
                ),
                "notices": session.notices,
            }
    return results


def resumed(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Six steps at a stretch, and three and three."""
    results = {}
    for label, (name, options) in strategies.items():
        straight = make_net()
        optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
        with offbeat.attach(straight, optimizer, REGISTRY[name](**options)) as session:
            for step in range(3):
                step_(straight, optimizer, rank, step)
            state, weights = (
                session.state_dict(),
                {key: t.clone() for key, t in straight.state_dict().items()},
            )
            for step in range(3, 6):
                step_(straight, optimizer, rank, step)
        second = make_net(seed=5)
        second.load_state_dict(weights)
        optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        with offbeat.attach(second, optimizer, REGISTRY[name](**options)) as session:
            session.load_state_dict(state)
            for step in range(3, 6):
                step_(second, optimizer, rank, step)
        results[label] = {"straight": fingerprint(straight), "resumed": fingerprint(second)}
    return results


def trouble(rank: int, world_size: int, *, strategies: Strategies, kind: str) -> dict[str, Any]:
    """Something is wrong with one factor from step 2 on, on one rank or on all of them."""
    results = {}
    for label, (name, options) in strategies.items():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer, REGISTRY[name](**options)) as session:
            scheduler = part_of(session).scheduler
            for step in range(5):
                if step == 2 and kind == "retired" and rank == 1 and 1 in scheduler.watched:
                    scheduler.capture.retire(scheduler.watched[1], "it was told to")
                if step == 2 and kind == "indefinite":
                    for factor in part_of(session).accumulator.factors.values():
                        factor.weighted_sum.fill_(-1e3)
                if step == 2 and kind == "nan factor" and rank == 1 and 0 in scheduler.watched:
                    broken = torch.full((1, 2, 3, 3), float("nan"), dtype=torch.float64)
                    scheduler.capture.saw_inputs(scheduler.watched[0], broken)
                step_(model, optimizer, rank, step)
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            results[label] = {
                "fingerprint": fingerprint(model),
                "notices": session.notices,
                "finite": finite,
            }
    return results


def unlike_devices(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Rank 1 computes with another number of threads than the others."""
    torch.set_num_threads(2 if rank == 1 else 1)
    return train(rank, world_size, strategies=strategies, steps=3, lr=0.05)


def accumulating(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Each step's examples come in two passes, of which only the second is synchronised; rank 1
    also looks at others.
    """
    results = {}
    for label, (name, options) in strategies.items():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer, REGISTRY[name](**options)) as session:
            for step in range(6):
                x, y = batch_of(rank, step)
                with session.no_sync():
                    (loss_of(model, (x[:1], y[:1])) / 2).backward()
                (loss_of(model, (x[1:], y[1:])) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 1:
                    with torch.no_grad():
                        model(x)
        results[label] = {
            "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "fingerprint": fingerprint(model),
        }
    return results
