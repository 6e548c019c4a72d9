"""Workers who are each alone meet in a directory, and are not connected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.averaging.object_store import ObjectStore
from ranks_support.launch import Place, Templates, launch_in_places

pytestmark = pytest.mark.ranks


def train_alone(rank: int, world_size: int, *, path: str) -> list[float]:
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    torch.manual_seed(rank)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = ObjectStore(path, rank=rank, world_size=world_size)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=3, exchange=store)) as session:
        for _ in range(7):
            x = torch.randn(8, 5)
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.world_size == 1
        assert session.stats.messages_sent == 0
        assert not dist.is_initialized()
    result: list[float] = model.weight.flatten().tolist()
    return [*result, session.stats.exchanges]


def test_processes_without_a_connection_end_with_one_model(
    tmp_path: Path, templates: Templates
) -> None:
    results = launch_in_places(
        train_alone,
        [Place()] * 3,
        templates=templates,
        directory=tmp_path,
        arguments={"path": str(tmp_path / "run")},
    )
    assert results == [results[0]] * 3
    assert results[0][-1] == 2
