"""`Auto` on real processes and real sockets: what takes over there, and what deaths do then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import offbeat
from offbeat.errors import PeerError
from offbeat.simulation.measured import MeasuredRun, Predicted
from offbeat.strategies import auto
from offbeat.strategies.base import Strategy
from rank_jobs.islands import loss_of as island_loss
from rank_jobs.islands import make_mesh, make_model, shard, whole
from rank_jobs.regression import fingerprint, make_net, train
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

LOOK = 6


@contextmanager
def choosing(to: str) -> Iterator[None]:
    """`to` is predicted to be far faster than all others."""

    def predicted(strategy: Strategy, run: MeasuredRun, *, period: int = 1) -> Predicted:
        seen = float(run.computed_s.max(axis=1).mean())
        return Predicted(seen / 1e3 if strategy.name == to else seen, 0)

    with (
        patch.object(auto, "predict", predicted),
        patch.object(auto, "FIRST_LOOK", LOOK),
        # However little of a step is waiting.
        patch.object(auto, "LEAST_MARGIN", float("-inf")),
        # However small the model is, an average takes longer than a step of it.
        patch.object(auto, "STEPS_OF_AN_AVERAGE", 1e9),
        patch.object(auto, "CORES_BESIDE", 0.0),
    ):
        yield


def changes(
    rank: int, world_size: int, *, to: str, make: str = "SGD", dies: bool = False
) -> dict[str, Any]:
    """After a few steps `to` is predicted to be far faster, and takes over. The last rank may be
    killed later.
    """

    model = make_net()
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.01)
    found: dict[str, Any] = {"blamed": None}
    with choosing(to):
        try:
            with offbeat.attach(model, optimizer, "auto") as session:
                train(model, optimizer, rank, range(LOOK + 1))
                found["at_work"] = session.acting.name
                train(model, optimizer, rank, range(LOOK + 1, LOOK + 25))
                if dies and rank == world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                train(model, optimizer, rank, range(LOOK + 25, LOOK + 40))
                found["notices"] = list(session.notices)
        except PeerError as error:
            found["blamed"] = error.rank
    return found | {"fingerprint": fingerprint(model)}


@pytest.mark.parametrize(
    ("to", "make"),
    [("gtopk", "AdamW"), ("powersgd", "SGD"), ("localsgd", "SGD"), ("wagma", "AdamW")],
)
def test_the_strategy_takes_over_and_all_ranks_end_alike(
    run_ranks: RunRanks, to: str, make: str
) -> None:
    results = run_ranks(changes, 3, to=to, make=make)
    assert [result["at_work"] for result in results] == [to] * 3
    assert any(f"goes over to {to}" in notice for notice in results[0]["notices"])
    assert len({result["fingerprint"] for result in results}) == 1


def test_a_death_is_named_by_what_took_over(run_ranks: RunRanks) -> None:
    results = run_ranks(changes, 3, to="gtopk", dies=True, may_die=[2])
    assert [result["blamed"] for result in results[:2]] == [2, 2]


def test_the_others_go_on_where_what_took_over_survives(run_ranks: RunRanks) -> None:
    results = run_ranks(changes, 3, to="wagma", dies=True, may_die=[2])
    assert [result["blamed"] for result in results[:2]] == [None, None]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]


ON_ISLANDS = ("gtopk", "localsgd")


def on_islands(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Two replicas, each divided among two ranks."""
    mesh = make_mesh(world_size)
    return [with_islands(mesh, rank, to) for to in ON_ISLANDS]


def with_islands(mesh: DeviceMesh, rank: int, to: str) -> dict[str, Any]:
    model = make_model()
    shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    with (
        choosing(to),
        offbeat.attach(model, optimizer, "auto", mesh=mesh["replicate"]) as session,
    ):
        for step in range(LOOK + 12):
            island_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        at_work = session.acting.name
    return {"at_work": at_work, "model": whole(model).tolist()}


def test_islands_choose_together(run_ranks: RunRanks) -> None:
    for results, to in zip(zip(*run_ranks(on_islands, 4), strict=True), ON_ISLANDS, strict=True):
        assert [result["at_work"] for result in results] == [to] * 4
        for result in results:
            assert result["model"] == results[0]["model"]


def real_choice(rank: int, world_size: int) -> dict[str, Any]:
    """Nothing is imitated: the ranks measure their links and themselves, and choose."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        patch.object(auto, "LEAST_MARGIN", 0.0),
        offbeat.attach(model, optimizer, offbeat.Auto()) as session,
    ):
        train(model, optimizer, rank, range(auto.FIRST_LOOK + 3))
        return {"at_work": session.acting.name, "notices": list(session.notices)}


def test_it_measures_chooses_and_says_why(run_ranks: RunRanks) -> None:
    results = run_ranks(real_choice, 3)
    assert len({result["at_work"] for result in results}) == 1
    said = [notice for notice in results[0]["notices"] if notice.startswith("auto")]
    assert len(said) == 3
    assert "links carry" in said[0]
    assert all(name in said[1] for name in ("allreduce", "gtopk", "powersgd", "localsgd"))
