"""Averages among members that die, come back and come late, as real processes."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.averaging.members import AverageOfMembers
from offbeat.session.attach import attach_through
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from rank_jobs.megabatch import Dying
from rank_jobs.regression import fingerprint, make_net, train
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
PERIOD, STEPS, DIES_AT = 2, 20, 3
NESTEROV = offbeat.Outer(lr=0.7, momentum=0.8)


def attached(
    net: torch.nn.Module, exchange: str, at_message: int | None = None
) -> tuple[offbeat.Session, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    strategy = offbeat.LocalSGD(period=PERIOD, outer=NESTEROV, exchange=exchange)
    session = attach_through(
        lambda driver: driver if at_message is None else Dying(driver, at_message),
        net,
        optimizer,
        strategy,
    )
    return session, optimizer


def averages_of(session: offbeat.Session) -> int:
    return int(session.stats.exchanges)


def killed(rank: int, world_size: int, *, at_message: int) -> dict[str, Any]:
    """Rank 1 dies between two averages, and rank 2 in the middle of one."""
    net = make_net()
    Dying.is_armed = False
    session, optimizer = attached(net, "members", at_message if rank == 2 else None)
    prints = []
    with session:
        for step in range(STEPS):
            if rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            Dying.is_armed = step >= 9
            train(net, optimizer, rank, range(step, step + 1))
            if session.replicas_agree:
                prints.append(fingerprint(net))
        numbers = averages_of(session), session.stats.steps
        session.finish()
        return {
            "prints": prints,
            "numbers": numbers,
            "notices": session.notices,
            "mean": fingerprint(session.averaged_model()),
        }


@pytest.mark.parametrize("at_message", [1, 3, 5])
def test_those_who_live_take_all_their_steps_and_hold_the_same(
    run_ranks: RunRanks, at_message: int
) -> None:
    """As many averages as without a death: what the others had computed was not lost."""
    first, *_, last = run_ranks(killed, 4, at_message=at_message, may_die=[1, 2], timeout_s=90)
    assert first["prints"] == last["prints"]
    assert len(set(first["prints"])) == STEPS // PERIOD
    assert first["numbers"] == last["numbers"] == [STEPS // PERIOD, STEPS]
    assert first["mean"] == last["mean"] == first["prints"][-1]
    for dead in (1, 2):
        assert any(f"without worker {dead}" in notice for notice in first["notices"])


def come_back(rank: int, world_size: int) -> dict[str, Any]:
    """What the newcomer does, which knows neither the model nor how far the run is, and loads an
    older checkpoint.
    """
    net = make_net(seed=5)
    session, optimizer = attached(net, "members")
    with session:
        taken = copy.deepcopy(net.state_dict())
        older = copy.deepcopy(session.state_dict())
        counts = older["callbacks"]["average_of_members"]["replicated"]
        counts |= {"num_steps": 1, "num_averages": 0}
        net.load_state_dict(make_net(seed=6).state_dict())  # as a script does that is run anew
        session.load_state_dict(older)
        loaded = net.state_dict()
        kept = all(torch.equal(loaded[name], each) for name, each in taken.items())
        again = session.state_dict()["callbacks"]["average_of_members"]["replicated"]
        train(net, optimizer, rank, range(session.start_step, 2 * STEPS))
        return {
            "start": session.start_step,
            "num_steps": again["num_steps"],
            "kept": kept,
            "left_out": [
                what
                for what in ("model", "state of the session")
                if any(f"the older {what}," in notice for notice in session.notices)
            ],
            "held": fingerprint(net),
        }


def heard(session: offbeat.Session, words: str) -> bool:
    return any(words in notice for notice in session.notices)


def returns(rank: int, world_size: int, *, wanted: str) -> dict[str, Any]:
    """Rank 2 is killed, and rank 0 has it started anew as a process that joins the run."""
    os.environ[SECRET_VARIABLE] = SECRET
    net = make_net()
    session, optimizer = attached(net, "members")
    with session:
        asked = False
        for step in range(2 * STEPS):
            if rank == 2 and step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            # The run goes on once it is back. Others may hear of its death after any step.
            while True:
                if rank == 0 and not asked and heard(session, "without worker 2"):
                    asked = True
                    returning = {RETURN_VARIABLE: "1", SECRET_VARIABLE: SECRET}
                    ask_for(wanted, launcher_environment(2, world_size) | returning)
                if step != STEPS or heard(session, "with worker 2 come in"):
                    break
                pause()
            train(net, optimizer, rank, range(step, step + 1))
        return {"held": fingerprint(net), "averages": averages_of(session)}


def test_one_that_returns_goes_on_where_the_others_are(
    run_ranks: RunRanks, expect_newcomer: ExpectNewcomer
) -> None:
    expected = expect_newcomer(come_back)
    first, second, _ = run_ranks(
        returns, 3, wanted=str(expected.wanted), may_die=[2], timeout_s=120
    )
    newcomer = expected.value()
    assert newcomer["kept"]
    assert newcomer["left_out"] == ["model", "state of the session"]
    assert newcomer["num_steps"] == newcomer["start"]
    assert newcomer["start"] % PERIOD == 0
    assert DIES_AT < newcomer["start"] < 2 * STEPS
    assert first["averages"] == second["averages"] == STEPS
    assert newcomer["held"] == first["held"] == second["held"]


def late(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 2 computes its second period while the others make five averages without it."""
    net = make_net()
    session, optimizer = attached(net, "60%+0.05s")
    word = torch.zeros(1)
    with session:
        (part,) = (each for each in session.callbacks if isinstance(each, AverageOfMembers))
        train(net, optimizer, rank, range(PERIOD))
        if rank == 2:
            dist.recv(word, 0)
        else:
            train(net, optimizer, rank, range(PERIOD, 6 * PERIOD))
        apart = averages_of(session), fingerprint(net)
        if rank == 0:
            dist.send(word, 2)
        train(net, optimizer, rank, range(6 * PERIOD, 7 * PERIOD))
        session.finish()
        return {
            "apart": apart,
            "averages": part.counters()["exchanges"],
            "held": fingerprint(net),
            "notices": session.notices,
        }


def test_with_a_quorum_nobody_waits_for_one_that_is_late(run_ranks: RunRanks) -> None:
    first, second, last = run_ranks(late, 3, timeout_s=90)
    assert first["apart"] == second["apart"]
    assert first["apart"][0] == 6
    assert last["apart"][0] == 1
    assert first["held"] == second["held"] == last["held"]
    assert {each["averages"] for each in (first, second, last)} <= {7, 8}
