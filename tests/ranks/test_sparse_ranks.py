"""Gradients that have other rows on each rank: exchanged as dense ones, or left alone where weights
are averaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance_support.sparse_nets import SparseNet, batch
from lab_support.rows import write
from offbeat.xmc.row_optimizers import RowAdagrad, RowSGD
from offbeat.xmc.xmlrepo import XmlFiles
from offbeat_lab.config import Request
from offbeat_lab.records import Record
from offbeat_lab.sparse_data import Synthetic
from offbeat_lab.train import plan, train
from rank_jobs.lab import attach, flat_parameters
from rank_jobs.regression import fingerprint
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

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
        attached = attach(name, options, net, optimizer, world_size)
        with attached.session:
            for step in range(NUM_STEPS):
                attached.backward(attached.module(*batch(10 * step + rank)))
                attached.optimizer.step()
                attached.optimizer.zero_grad()
                losses_backward(plain, world_size, step)
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        distance = torch.tensor(flat_parameters(net)) - torch.tensor(flat_parameters(plain))
        results[label] = {"distance": float(distance.abs().max()), "print": fingerprint(net)}
    return results


def test_exchanged_gradients_are_those_of_all_batches_together(run_ranks: RunRanks) -> None:
    strategies = {
        "allreduce": ("allreduce", {}),
        "gtopk": ("gtopk", {"density": 1.0, "collective": "reduce_scatter"}),
        "ddp": ("ddp", {}),
    }
    ranks = run_ranks(exchange, 2, strategies=strategies)
    for label in strategies:
        assert max(result[label]["distance"] for result in ranks) < 1e-5, label
        assert len({result[label]["print"] for result in ranks}) == 1, label


def average(rank: int, world_size: int, *, period: int) -> dict[str, Any]:
    """Train with LocalSGD, and do the same for all ranks in this process."""
    net = SparseNet()
    nets = [SparseNet() for _ in range(world_size)]
    optimizer, *optimizers = (RowSGD(each.parameters(), 0.1, momentum=0.9) for each in (net, *nets))
    distances = []
    options = {"period": period, "warmup": 0, "optimizer_state": "local"}
    attached = attach("localsgd", options, net, optimizer, world_size)
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
            distance = torch.tensor(flat_parameters(net)) - torch.tensor(
                flat_parameters(nets[rank])
            )
            distances.append(float(distance.abs().max()))
    return {"distances": distances, "sparse": sparse, "print": fingerprint(net)}


def test_weights_are_averaged_and_gradients_stay_sparse(run_ranks: RunRanks) -> None:
    ranks = run_ranks(average, 2, period=3)
    assert max(distance for result in ranks for distance in result["distances"]) < 1e-6
    assert all(result["sparse"] for result in ranks)
    assert len({result["print"] for result in ranks}) == 1


@pytest.mark.parametrize("strategy", ["localsgd", "ddp"])
def test_a_run_of_sparse_batches_is_recorded_and_resumed(strategy: str, tmp_path: Path) -> None:
    like = Synthetic(num_features=50, num_labels=9, mean_draws=8.0, mean_labels=1.5)
    for split in ("train", "test"):
        write(XmlFiles(path=tmp_path / split), like.read(60, split=split), header=(60, 50, 9))
    settings = [
        f"path={tmp_path / 'train'}",
        f"test_path={tmp_path / 'test'}",
        "batch_size=10",
        "hidden=4",
        "drawn_labels=5",
    ]
    out = tmp_path / "run"
    request = Request(task="xmc", strategy=strategy, workers=2, steps=4, settings=settings)
    first = train(plan(request, out=out), lambda news: None)
    assert first is not None
    assert (first.status, first.steps, first.metric_name) == ("finished", 4, "precision_at_1")
    assert first.metric is not None
    assert 0 <= first.metric <= 1
    again = train(plan(Request(steps=6, workers=1), resume=out), lambda news: None)
    assert again is not None
    assert (again.steps, again.resumed_from_step, again.skipped_steps) == (6, 4, 0)
    assert [event.batch_size for event in Record(out).events(0)] == [10] * 6
