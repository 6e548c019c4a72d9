"""Sessions in checkpoints of `torch.distributed.checkpoint`, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import offbeat
from offbeat.errors import CheckpointError
from rank_jobs.regression import fingerprint, make_net, train
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

SPARSE = offbeat.GTopK(density=0.05, collective="all_gather")


def saved(rank: int, world_size: int, *, strategy: Any, directory: str) -> dict[str, Any]:
    """Train, save halfway, and go on."""
    net = make_net()
    optimizer = make_optimizer(net, strategy)
    with offbeat.attach(net, optimizer, strategy) as session:
        train(net, optimizer, rank, range(4))
        owed = owed_by_all(session)
        state = {"model": net.state_dict(), "session": session.state_to_save()}
        if optimizer.state:
            state["optimizer"] = get_optimizer_state_dict(net, optimizer)
        dcp.save(state, checkpoint_id=directory)
        train(net, optimizer, rank, range(4, 8))
    return {"owed": owed, "end": fingerprint(net)}


def resumed(rank: int, world_size: int, *, strategy: Any, directory: str) -> dict[str, Any]:
    """Go on from there."""
    net = make_net(seed=7)
    optimizer = make_optimizer(net, strategy)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    state: dict[str, Any] = {"model": net.state_dict()}
    if strategy.replicas_differ:
        state["optimizer"] = get_optimizer_state_dict(net, optimizer)
    with offbeat.attach(net, optimizer, strategy) as session:
        with pytest.raises(CheckpointError, match="no state of a session"):
            session.state_to_load(metadata, "another")
        state["session"] = session.state_to_load(metadata)
        dcp.load(state, checkpoint_id=directory)
        net.load_state_dict(state["model"])
        if "optimizer" in state:
            set_optimizer_state_dict(net, optimizer, state["optimizer"])
        session.load_state_dict(state["session"])
        owed = owed_by_all(session)
        train(net, optimizer, rank, range(4, 8))
    return {"owed": owed, "end": fingerprint(net)}


def make_optimizer(net: torch.nn.Module, strategy: Any) -> torch.optim.Optimizer:
    """One with a state of its own, where no strategy takes its place before gradients travel."""
    if strategy.replicas_differ:
        return torch.optim.Adam(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def owed_by_all(session: offbeat.Session) -> list[float]:
    state = session.state_dict()["callbacks"]
    entries = [e for each in state.values() for e in sorted(each["additive"].items())]
    mine = torch.cat([torch.zeros(1), *(value.reshape(-1) for _, value in entries)])
    return torch.tensor(session.gather(mine.tolist())).sum(dim=0).tolist()


@pytest.mark.parametrize(
    ("strategy", "world_sizes"),
    [(SPARSE, (2, 3, 1)), (offbeat.DeAR(), (2,)), (offbeat.LocalSGD(period=2), (2,))],
    ids=["gtopk", "dear", "localsgd"],
)
def test_a_session_is_saved_and_loaded_with_the_model_and_the_optimizer(
    run_ranks: RunRanks, tmp_path: Path, strategy: Any, world_sizes: tuple[int, ...]
) -> None:
    how = {"strategy": strategy, "directory": str(tmp_path / "checkpoint")}
    before = run_ranks(saved, 2, **how)
    for world_size in world_sizes:
        after = run_ranks(resumed, world_size, **how)
        assert len({result["end"] for result in after}) == 1
        for result in after:
            assert result["owed"] == pytest.approx(before[0]["owed"], rel=1e-5, abs=1e-6)
        if world_size == 2:
            assert after[0]["end"] == before[0]["end"]
    if strategy is SPARSE:
        assert any(before[0]["owed"])
