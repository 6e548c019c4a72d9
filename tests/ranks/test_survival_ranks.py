"""Workers that die, stop and come back while mega-batches are computed and merged, as real
processes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import offbeat
from offbeat import Session
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import Claim, ClaimLog, MergedRound
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.generations import Generations
from offbeat.session import session as session_module
from offbeat.session.attach import attach_through
from offbeat.strategies.adaptive import MegaBatchStrategy
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from offbeat.transport.link import PeerLimits
from rank_jobs.megabatch import NUM_SAMPLES, Dying, Numbers, make_net, merges_of, samples, sgd, step
from rank_jobs.regression import fingerprint
from ranks_support.launch import RunRanks
from ranks_support.process import (
    ExpectNewcomer,
    ask_for,
    expect_newcomer,
    launcher_environment,
    pause,
)

__all__ = ["expect_newcomer"]
pytestmark = pytest.mark.ranks

SECRET = "a secret of this test run only"
PATIENCE_S = 60.0
NUM_ROWS, ROW = 4000, 16


SILENCE_S = 3.0
"""Longer than a busy machine keeps a process that lives: its peers would go on without it."""


def notice_deaths_soon(*, heartbeat_timeout_s: float = 10.0) -> None:
    """Else a test would wait for many seconds."""
    limits = PeerLimits(
        grace_s=0.2,
        heartbeat_interval_s=0.2,
        heartbeat_timeout_s=heartbeat_timeout_s,
        connect_timeout_s=10.0,
        linger_s=1.0,
    )
    session_module.Generations = partial(  # type: ignore[misc, assignment]
        Generations, interval_s=0.02, silence_s=SILENCE_S, limits=limits
    )


def die_while_claiming(after: int) -> None:
    """Raise the number of samples given out, and say nothing more."""
    claims = iter(range(after))
    claim = ClaimLog.claim

    def mute(log: ClaimLog, num_samples: int) -> Claim | None:
        if next(claims, None) is None:
            claim(log, num_samples)
            os.kill(os.getpid(), signal.SIGKILL)
        return claim(log, num_samples)

    ClaimLog.claim = mute  # type: ignore[method-assign]


def strategies() -> dict[str, MegaBatchStrategy]:
    adaptive = offbeat.AdaptiveSGD(mega_batch=10)
    return {
        "adaptive": adaptive,
        "adaptive, read ahead": adaptive,
        "overlap": replace(adaptive, overlap=True),
        "momentum": offbeat.AdaptiveSGD(mega_batch=10, warmup=0, rule="published"),
        "elastic": offbeat.ElasticSGD(mega_batch=10),
    }


def attached(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    label: str,
    at_message: int | None = None,
) -> tuple[Session, DispatchLoader]:
    wrap = (
        (lambda driver: driver)
        if at_message is None
        else (lambda driver: Dying(driver, at_message))
    )
    session = attach_through(wrap, net, optimizer, strategies()[label])
    reads_ahead = label == "adaptive, read ahead"
    loader = session.loader(
        DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1)
        if reads_ahead
        else Numbers(),
        seed=3,
        batch_size=None if reads_ahead else 4,
    )
    assert isinstance(loader, DispatchLoader)
    return session, loader


def killed(
    rank: int, world_size: int, *, label: str, deaths: dict[str, list[Any]]
) -> dict[str, Any]:
    """Ranks die in different ways, all but rank 0. Two epochs: what was merged?"""
    notice_deaths_soon()
    how, when = deaths.get(str(rank), ("lives", None))
    if how == "claiming":
        die_while_claiming(when)
    net = make_net()
    optimizer = sgd(net)
    num_steps, merges = 0, []
    Dying.is_armed = False
    session, loader = attached(net, optimizer, label, at_message=when if how == "merging" else None)
    with session:
        while loader.epoch < 2:
            for batch in loader.one_mega_batch():
                num_steps, Dying.is_armed = num_steps + 1, True
                if how == "computing" and num_steps == when:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(net, optimizer, batch)
                time.sleep(2e-3)  # emulated computation
            merges.append(merges_of(loader, net))
        session.finish()
        mean = fingerprint(session.averaged_model())
        return {"merges": merges, "notices": session.notices, "mean": mean}


@pytest.mark.parametrize(
    ("label", "deaths"),
    [
        ("adaptive", {"1": ("computing", 2), "2": ("merging", 9), "3": ("claiming", 6)}),
        ("elastic", {"1": ("merging", 3), "2": ("merging", 9), "3": ("computing", 4)}),
        ("overlap", {"1": ("merging", 7), "2": ("merging", 19), "3": ("claiming", 6)}),
    ],
)
def test_every_sample_counts_once_whoever_dies_where(
    run_ranks: RunRanks, label: str, deaths: dict[str, list[Any]]
) -> None:
    """All but one die: while computing, in the middle of a merge, with a claim that nobody has
    heard of.
    """
    survivor = run_ranks(killed, 4, label=label, deaths=deaths, may_die=[1, 2, 3], timeout_s=60)[0]
    merges = survivor["merges"]
    assert [merge["place"] for merge in merges] == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert samples(merges[:3]) == samples(merges[3:]) == list(range(NUM_SAMPLES))
    assert [rank for rank, _ in merges[-1]["works"]] == [0]
    assert any("are given out again" in notice for notice in survivor["notices"])
    assert survivor["mean"] == merges[-1]["print"]


def test_those_who_live_hold_the_same_after_each_merge(run_ranks: RunRanks) -> None:
    """Two of four die, one of them at the end of a merge that the others have made."""
    deaths = {"1": ("merging", 29), "3": ("computing", 9)}
    results = run_ranks(killed, 4, label="momentum", deaths=deaths, may_die=[1, 3], timeout_s=60)
    assert results[0]["merges"] == results[2]["merges"]
    assert samples(results[0]["merges"][:3]) == list(range(NUM_SAMPLES))
    assert len({merge["print"] for merge in results[0]["merges"]}) == 6


def test_what_was_claimed_ahead_is_given_out_again(run_ranks: RunRanks) -> None:
    """Rank 1 dies with a batch in hand, and with one that its worker process reads."""
    results = run_ranks(
        killed,
        3,
        label="adaptive, read ahead",
        deaths={"1": ("computing", 2)},
        may_die=[1],
        timeout_s=60,
    )
    assert results[0]["merges"] == results[2]["merges"]
    merges = results[0]["merges"]
    assert samples(merges[:3]) == samples(merges[3:]) == list(range(NUM_SAMPLES))
    assert any("are given out again" in notice for notice in results[0]["notices"])


def until_it_is_back(
    session: Session, loader: DispatchLoader, net: torch.nn.Module, optimizer: Any
) -> list[dict[str, Any]]:
    """Train until rank 2 has been away and is in a merge again; what became of each mega-batch."""
    merges: list[dict[str, Any]] = []
    was_away = session.start_step > 0
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for batch in loader.one_mega_batch():
            step(net, optimizer, batch)
            time.sleep(2e-3)  # emulated computation
        merges.append(merges_of(loader, net))
        is_here = 2 in [work.rank for work in loader.last]
        was_away = (
            was_away
            or not is_here
            # It may be in the first merge here again, of which these have told already.
            or any(
                said in notice
                for notice in session.notices
                for said in ("was away for so long", "with worker 2")
            )
        )
        if was_away and is_here:
            session.finish()
            return merges
    raise AssertionError("rank 2 did not come back")


def stopped(rank: int, world_size: int, *, label: str) -> dict[str, Any]:
    """Rank 2 is stopped while it computes, and goes on once the others have gone on without it. It
    still computes with its batch while they merge, and comes back afterwards.
    """
    notice_deaths_soon(heartbeat_timeout_s=SILENCE_S)
    net = make_net()
    optimizer = sgd(net)
    session, loader = attached(net, optimizer, label)
    with session:
        pids = torch.zeros(world_size, dtype=torch.int64)
        pids[rank] = os.getpid()
        dist.all_reduce(pids)
        pid = int(pids[2])
        if rank == 2:
            step(net, optimizer, next(iter(loader.one_mega_batch())))
            os.kill(pid, signal.SIGSTOP)
            while not any("was away for so long" in notice for notice in session.notices):
                pause()
            dist.send(pids, 0)
            dist.recv(pids, 0)
        merges = []
        if rank == 0:
            while not any("without worker 2" in notice for notice in session.notices):
                for batch in loader.one_mega_batch():
                    pause()
                    step(net, optimizer, batch)
                merges.append(merges_of(loader, net))
            os.kill(pid, signal.SIGCONT)
            dist.recv(pids, 2)
            for _ in range(5):
                for batch in loader.one_mega_batch():
                    step(net, optimizer, batch)
                    time.sleep(1e-2)  # emulated computation
                merges.append(merges_of(loader, net))
            assert not any("with worker 2" in notice for notice in session.notices)
            dist.send(pids, 2)
        merges += until_it_is_back(session, loader, net, optimizer)
        return {"merges": merges, "notices": session.notices}


def test_a_worker_that_was_stopped_comes_back_with_the_others_model(run_ranks: RunRanks) -> None:
    first, second, back = run_ranks(stopped, 3, label="elastic", timeout_s=90)
    assert first["merges"] == second["merges"]
    assert any("was away for so long" in notice for notice in back["notices"])
    assert without_works(back["merges"])[-1] == without_works(first["merges"])[-1]


def without_works(merges: list[dict[str, Any]]) -> list[Any]:
    """What one that came in within a mega-batch knows of it too."""
    return [[merge["print"], merge["place"]] for merge in merges]


def note_merges(net: torch.nn.Module) -> list[str]:
    """Models after each merge from now on, also of those within a mega-batch."""
    found: list[str] = []
    end_merge = MegaBatchCallback.end_merge

    def noting(part: MegaBatchCallback) -> MergedRound | None:
        merged = end_merge(part)
        found.append(fingerprint(net))
        return merged

    MegaBatchCallback.end_merge = noting  # type: ignore[method-assign]
    return found


def come_back(rank: int, world_size: int, *, label: str) -> dict[str, Any]:
    """What the newcomer does."""
    notice_deaths_soon()
    net = make_net(seed=5)
    optimizer = sgd(net)
    session, loader = attached(net, optimizer, label)
    with session:
        taken = fingerprint(net)
        merges = until_it_is_back(session, loader, net, optimizer)
    return {"taken": taken, "merges": merges}


def returns(rank: int, world_size: int, *, label: str, wanted: str) -> dict[str, Any]:
    """Rank 2 is killed, and rank 0 has it started anew as a process that joins the run."""
    os.environ[SECRET_VARIABLE] = SECRET
    notice_deaths_soon()
    net = make_net()
    optimizer = sgd(net)
    merged = note_merges(net)
    session, loader = attached(net, optimizer, label)
    with session:
        merges = []
        while not any("without worker 2" in notice for notice in session.notices):
            for batch in loader.one_mega_batch():
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                pause()
                step(net, optimizer, batch)
            merges.append(merges_of(loader, net))
        if rank == 0:
            returning = {RETURN_VARIABLE: "1", SECRET_VARIABLE: SECRET}
            ask_for(wanted, launcher_environment(2, world_size) | returning)
        merges += until_it_is_back(session, loader, net, optimizer)
        return {"merges": merges, "merged": merged}


def test_a_worker_that_returns_has_the_model_of_a_merge_and_then_the_others_models(
    run_ranks: RunRanks, expect_newcomer: ExpectNewcomer
) -> None:
    expected = expect_newcomer(come_back, label="momentum")
    first, second, _ = run_ranks(
        returns, 3, label="momentum", wanted=str(expected.wanted), may_die=[2]
    )
    newcomer = expected.value()
    assert first["merges"] == second["merges"]
    assert newcomer["taken"] in first["merged"]
    both = without_works(newcomer["merges"]), without_works(first["merges"])
    assert both[0] == both[1][-len(both[0]) :]
    assert [rank for rank, _ in first["merges"][-1]["works"]] == [0, 1, 2]
    end = 0
    for merge in first["merges"]:
        found = samples([merge])
        assert found == list(range(end, end + len(found)))
        end = (end + len(found)) % NUM_SAMPLES


class Rows(torch.nn.Module):
    """Many rows, of which a batch touches few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.EmbeddingBag(NUM_ROWS, ROW, sparse=True, mode="sum")
        self.head = torch.nn.Linear(ROW, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(words))
        return out


def rows(rank: int, world_size: int) -> dict[str, Any]:
    """Merges of a model with many rows: bytes sent for each, and what all hold after it. The last
    touches all rows.
    """
    net = Rows()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strategy = offbeat.AdaptiveSGD(mega_batch=world_size, rule="published")
    found = []
    warnings.filterwarnings("ignore", "no loader of this session")
    with offbeat.attach(net, optimizer, strategy) as session:
        sent = session.stats.bytes_sent
        for merge in range(5):
            words = torch.arange(20).reshape(2, 10) + 20 * (2 * merge + rank)
            net(words).sum().backward()
            if merge == 4:
                with torch.no_grad():
                    net.words.weight.mul_(1.5)  # not by the optimizer
            optimizer.step()
            optimizer.zero_grad()
            now = session.stats.bytes_sent
            found.append(
                {
                    "bytes": now - sent,
                    "print": hashlib.sha256(fingerprint(net).encode()).hexdigest(),
                }
            )
            sent = now
    return {"merges": found}


def test_merges_send_the_rows_that_changed(run_ranks: RunRanks) -> None:
    """The first sends all, since nobody knows yet who has changed what, and so does the last, which
    changes all.
    """
    ranks = run_ranks(rows, 2)
    assert [merge["print"] for merge in ranks[0]["merges"]] == [
        merge["print"] for merge in ranks[1]["merges"]
    ]
    whole = 4 * (NUM_ROWS * ROW + ROW + 1)
    touched = 4 * (2 * 20 * ROW + ROW + 1)
    talk = 2500
    for rank in ranks:
        sent = [merge["bytes"] for merge in rank["merges"]]
        assert whole <= sent[0] <= whole + talk
        assert whole <= sent[4] <= whole + talk
        assert touched <= sent[1] <= touched + talk
        assert all(2 * touched > sent_then >= touched for sent_then in sent[2:4])
