"""Workers that die while a run begins, what the next session of those who live is told, and whose
record it is, as real processes.
"""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

import offbeat
from offbeat.errors import OffbeatError
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.generations import Generations
from offbeat.session import session as session_module
from offbeat.session import sharded as sharded_module
from offbeat.session.attach import attach_through
from offbeat.strategies.base import Strategy
from offbeat.transport import connect as connect_module
from offbeat.transport import rendezvous
from offbeat.transport.link import PeerLimits
from rank_jobs.megabatch import NUM_SAMPLES, Dying, Numbers, make_net, merges_of, samples, sgd, step
from rank_jobs.regression import fingerprint
from ranks_support.launch import RunRanks
from ranks_support.process import pause

pytestmark = pytest.mark.ranks


SILENCE_S = 3.0
"""Longer than a busy machine keeps a process that lives: its peers would go on without it."""


def notice_deaths_soon() -> None:
    """Else a test would wait for many seconds."""
    limits = PeerLimits(
        grace_s=0.2, heartbeat_interval_s=0.2, connect_timeout_s=SILENCE_S, linger_s=1.0
    )
    session_module.Generations = partial(  # type: ignore[misc, assignment]
        Generations, interval_s=0.02, silence_s=SILENCE_S, limits=limits
    )
    rendezvous.GRACE_S = 0.2  # type: ignore[misc]


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def in_attach(rank: int, world_size: int, *, victim: int, doing: str) -> dict[str, Any]:
    """One rank dies before the run is founded. What do the others hear?"""
    notice_deaths_soon()
    if rank == victim:
        match doing:
            case "connecting":
                connect_module.new_gloo_backend = die  # type: ignore[assignment]
            case "telling where it listens":
                connect_module.Peers = die  # type: ignore[assignment, misc]
            case "comparing":
                sharded_module.agree = die  # type: ignore[assignment]
    net = make_net()
    try:
        offbeat.attach(net, sgd(net), offbeat.AdaptiveSGD(mega_batch=10))
    except OffbeatError as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "rank": getattr(error, "rank", None),
        }
    return {}


@pytest.mark.parametrize("doing", ["connecting", "telling where it listens", "comparing"])
def test_before_a_run_is_founded_a_death_is_named_to_all(run_ranks: RunRanks, doing: str) -> None:
    results = run_ranks(in_attach, 4, victim=1, doing=doing, may_die=[1], timeout_s=60)
    for heard in (results[0], results[2], results[3]):
        assert (heard["kind"], heard["rank"]) == ("PeerError", 1)
        assert heard["message"].startswith("rank 1 ")


def founded(rank: int, world_size: int, *, strategy: str, deaths: dict[str, str]) -> dict[str, Any]:
    """All but rank 0 die, at points between the founding of the run and the first claim. An epoch:
    what was merged?
    """
    notice_deaths_soon()
    doing = deaths.get(str(rank))
    if doing == "founding":
        Generations.start = die  # type: ignore[method-assign]
    at_message = {
        "making its loader, in the middle": 2,
        "agreeing where to begin, in the middle": 6,
    }.get(doing or "")
    net = make_net()
    optimizer = sgd(net)
    recipe: Strategy = getattr(offbeat, strategy)(mega_batch=10)
    with attach_through(
        lambda driver: Dying(driver, at_message or 10**9), net, optimizer, recipe
    ) as session:
        if doing == "about to make its loader":
            die()
        loader = session.loader(Numbers(), batch_size=4, seed=3)
        assert isinstance(loader, DispatchLoader)
        if doing == "about to begin":
            die()
        merges = []
        while loader.epoch < 1:
            for batch in loader.one_mega_batch():
                step(net, optimizer, batch)
            merges.append(merges_of(loader, net))
        return {"merges": merges, "notices": session.notices}


@pytest.mark.parametrize(
    ("strategy", "deaths"),
    [
        (
            "AdaptiveSGD",
            {
                "1": "about to make its loader",
                "2": "agreeing where to begin, in the middle",
                "3": "founding",
            },
        ),
        ("ElasticSGD", {"1": "about to begin", "2": "making its loader, in the middle"}),
    ],
)
def test_once_it_is_founded_those_who_live_share_all_samples(
    run_ranks: RunRanks, strategy: str, deaths: dict[str, str]
) -> None:
    victims = list(map(int, deaths))
    survivor = run_ranks(
        founded,
        1 + len(victims),
        strategy=strategy,
        deaths=deaths,
        may_die=victims,
        timeout_s=60,
    )[0]
    assert samples(survivor["merges"]) == list(range(NUM_SAMPLES))
    assert {rank for merge in survivor["merges"] for rank, _ in merge["works"]} == {0}


def second_session(rank: int, world_size: int, *, strategy: str) -> dict[str, Any]:
    """The last rank dies in the first session. What do the others hear when they attach anew, and
    without it?
    """
    notice_deaths_soon()
    recipe: Strategy = (
        offbeat.WAGMA(period=2) if strategy == "WAGMA" else offbeat.AdaptiveSGD(mega_batch=4)
    )
    net = make_net()
    optimizer = sgd(net)
    dataset = Numbers()
    batch = [column[:4] for column in (dataset.x, dataset.y)]
    warnings.filterwarnings("ignore", "no loader of this session")
    with offbeat.attach(net, optimizer, recipe) as session:
        while not any("without worker" in notice for notice in session.notices):
            if rank == world_size - 1:
                die()
            pause()
            step(net, optimizer, [*batch, batch[0]])
    heard = ""
    try:
        offbeat.attach(net, optimizer, recipe)
    except OffbeatError as error:
        heard = f"{type(error).__name__}: {error}"
    living = dist.new_group(list(range(world_size - 1)), use_local_synchronization=True)
    with offbeat.attach(net, optimizer, recipe, group=living) as session:
        for _ in range(4):
            step(net, optimizer, [*batch, batch[0]])
        session.finish()
        mean = fingerprint(session.averaged_model())
        return {"heard": heard, "mean": mean, "world_size": session.world_size}


@pytest.mark.parametrize("strategy", ["AdaptiveSGD", "WAGMA"])
def test_who_attaches_anew_after_a_death_hears_of_it_at_once(
    run_ranks: RunRanks, strategy: str
) -> None:
    results = run_ranks(second_session, 3, strategy=strategy, may_die=[2], timeout_s=60)[:2]
    for heard in results:
        assert heard["heard"].startswith("PeerError: rank 2 was lost in an earlier session")
        assert "new_group([0, 1], use_local_synchronization=True)" in heard["heard"]
        assert heard["world_size"] == 2
    assert results[0]["mean"] == results[1]["mean"]


def recorded_by_some(rank: int, world_size: int, *, directory: str) -> int:
    if rank == world_size - 1:
        return 0
    net = make_net()
    some = dist.new_group(list(range(world_size - 1)), use_local_synchronization=True)
    recorder = offbeat.Recorder(directory)
    with offbeat.attach(net, sgd(net), offbeat.AllReduce(), group=some, recorder=recorder) as one:
        return one.world_size


def test_a_record_is_of_the_ranks_of_its_session_and_waits_for_no_others(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(recorded_by_some, 3, directory=str(tmp_path / "record")) == [2, 2, 0]
    found = {path.name for path in (tmp_path / "record").glob("*.json*")}
    assert found == {"config.json", "events-rank-0.jsonl", "events-rank-1.jsonl", "summary.json"}
