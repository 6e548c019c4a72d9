"""What the ranks of `test_sparse_ranks.py` do. Each function runs in every process and returns
JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from gradient_jobs import fingerprint
from lab_jobs import attach, parameters

from conformance_support.sparse_nets import SparseNet, batch
from offbeat.xmc.row_optimizers import RowAdagrad, RowSGD

NUM_STEPS = 6


def losses_backward(net: SparseNet, world_size: int, step: int) -> None:
    """The gradient of all ranks' batches, in one process."""
    for rank in range(world_size):
        (net(*batch(10 * step + rank)) / world_size).backward()


def exchange(
    rank: int, world_size: int, *, strategies: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Train with strategies that exchange gradients; how far is that from one process with all
    batches?
    """
    results = {}
    for label, (name, options) in strategies.items():
        net, plain = SparseNet(), SparseNet()
        optimizer, plain_optimizer = (RowAdagrad(each.parameters(), 0.1) for each in (net, plain))
        attached = attach(name, options, net, optimizer, rank, world_size)
        with attached.session:
            for step in range(NUM_STEPS):
                attached.backward(attached.module(*batch(10 * step + rank)))
                attached.optimizer.step()
                attached.optimizer.zero_grad()
                losses_backward(plain, world_size, step)
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        distance = torch.tensor(parameters(net)) - torch.tensor(parameters(plain))
        results[label] = {"distance": float(distance.abs().max()), "print": fingerprint(net)}
    return results


def average(rank: int, world_size: int, *, period: int) -> dict[str, Any]:
    """Train with LocalSGD, and do the same for all ranks in this process."""
    net = SparseNet()
    nets = [SparseNet() for _ in range(world_size)]
    optimizer, *optimizers = (RowSGD(each.parameters(), 0.1, momentum=0.9) for each in (net, *nets))
    distances = []
    attached = attach("localsgd", {"period": period}, net, optimizer, rank, world_size)
    with attached.session:
        for step in range(NUM_STEPS):
            attached.backward(attached.module(*batch(10 * step + rank)))
            attached.optimizer.step()
            sparse = all(p.grad is not None and p.grad.is_sparse for p in net.sparse_parameters())
            attached.optimizer.zero_grad()
            for other, (mine, its) in enumerate(zip(nets, optimizers, strict=True)):
                mine(*batch(10 * step + other)).backward()
                its.step()
                its.zero_grad()
            if (step + 1) % period == 0:
                with torch.no_grad():
                    for same in zip(*(each.parameters() for each in nets), strict=True):
                        mean = torch.stack(list(same)).mean(dim=0)
                        for parameter in same:
                            parameter.copy_(mean)
            distance = torch.tensor(parameters(net)) - torch.tensor(parameters(nets[rank]))
            distances.append(float(distance.abs().max()))
    return {"distances": distances, "sparse": sparse, "print": fingerprint(net)}
