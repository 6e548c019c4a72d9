"""The strategies whose ranks are answered for beside training, on real processes and
real sockets.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import OffbeatError, PeerError
from offbeat.membership.generations import Generations
from offbeat.session import session as session_module
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.torch_private import call_first_after_steps
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from offbeat.transport.link import PeerLimits
from rank_jobs.averaging import make_net, sgd, train
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

LR = 0.125
NUM_STEPS = 24
SILENCE_S = 3.0
"""Longer than a busy machine keeps a process that lives: its peers would go on without it."""


def strategies() -> dict[str, AveragingStrategy]:
    return {
        "wagma": offbeat.WAGMA(period=4),
        "wagma in 4 bits": offbeat.WAGMA(period=4, values="e3m0"),
        "wagma, strict": offbeat.WAGMA(period=3, quorum=1.0),
        "wagma, waiting": offbeat.WAGMA(period=4, overlap=False, quorum=1.0),
        "wagma, pairs, every third step": offbeat.WAGMA(group_size=2, period=6, interval=3),
        "wagma, no groups": offbeat.WAGMA(period=3, interval=3),
        "adpsgd": offbeat.ADPSGD(),
        "adpsgd in bfloat16": offbeat.ADPSGD(values="bfloat16"),
        "eagersgd, solo": offbeat.EagerSGD(mode="solo", period=7),
        "eagersgd": offbeat.EagerSGD(period=7),
    }


class Pushed(torch.nn.Module):
    """A model whose gradient is the same wherever it stands: where it ends says whose pushes it has
    had.
    """

    def __init__(self, num_elements: int = 12) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_elements))

    def forward(self, push: torch.Tensor) -> torch.Tensor:
        return (self.weight * push).sum()


def random_schedule(
    rank: int, world_size: int, *, seed: int, num_elements: int = 12
) -> dict[str, Any]:
    """Every rank takes its steps at a random pace. Where do all the models end?"""
    results = {}
    for label, strategy in strategies().items():
        draw = random.Random(f"{seed} {rank} {label}")
        slow = draw.choice([1, 1, 3])
        net = Pushed(num_elements)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        with offbeat.attach(net, optimizer, strategy) as session:
            total = 0.0
            for _ in range(NUM_STEPS):
                time.sleep(
                    slow * draw.random() * 4e-3
                )  # emulated computation: this is the schedule
                push = draw.randint(-8, 8)
                total += push
                net(torch.full((num_elements,), float(push))).backward()
                optimizer.step()
                optimizer.zero_grad()
            session.finish()
            parts = session.state_dict()["callbacks"].values()
            owed = sum(
                t.double().mean().item() for part in parts for t in part["additive"].values()
            )
            to_apply = sum(
                t.double().mean().item()
                for part in parts
                for name, t in part["local"].items()
                if "to_apply" in name
            )
            results[label] = {
                "pushed": total,
                "owed": owed,
                "to_apply": to_apply,
                "mean": session.averaged_model().weight.tolist(),
                "steps": session.stats.steps,
                "exchanges": session.stats.exchanges,
                "bytes_sent": session.stats.bytes_sent,
            }
    return results


def test_nothing_is_lost_on_a_random_schedule(run_ranks: RunRanks) -> None:
    """With steps of the same size wherever a model stands, the mean is where all steps together
    lead.
    """
    world_size = 5
    results = run_ranks(random_schedule, world_size, seed=world_size, timeout_s=60)
    for label in results[0]:
        ranks = [result[label] for result in results]
        pushed = (
            sum(rank["pushed"] - rank["owed"] - rank["to_apply"] for rank in ranks) / world_size
        )
        assert all(rank["steps"] == NUM_STEPS for rank in ranks)
        assert all(rank["exchanges"] > 0 for rank in ranks), label
        for rank in ranks:
            np.testing.assert_allclose(rank["mean"], -LR * pushed, atol=1e-3, err_msg=label)


def equal_after_meeting(rank: int, world_size: int) -> list[int]:
    """In every version everyone meets and waits for all. What does each rank hold after
    each step?
    """
    net = make_net()
    optimizer = sgd(net)
    prints = []
    with offbeat.attach(net, optimizer, offbeat.WAGMA(period=1, quorum=1.0, overlap=False)):
        for step in range(8):
            train(net, optimizer, rank, range(step, step + 1))
            prints.append(fingerprint(net))
    return prints


def test_a_strict_meeting_leaves_everyone_with_the_same_bits(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(equal_after_meeting, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(set(by_rank[0])) == len(by_rank[0])


def killed(rank: int, world_size: int, *, label: str, victims: list[int]) -> dict[str, Any]:
    """Some ranks are killed in the middle of a step. How do the others fare, before they hear of it
    and afterwards?
    """
    net = make_net()
    optimizer = sgd(net)
    draw = random.Random(rank)
    with offbeat.attach(net, optimizer, strategies()[label]) as session:
        for step in range(60):
            if rank in victims and step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(draw.random() * 4e-3)  # emulated computation
            train(net, optimizer, rank, range(step, step + 1))
            while step == 30 and not any("without worker" in each for each in session.notices):
                pause()
        session.finish()
        finite = all(bool(t.isfinite().all()) for t in session.averaged_model().parameters())
        return {"steps": session.stats.steps, "finite": finite}


@pytest.mark.parametrize(
    ("label", "world_size", "victims"),
    [
        ("wagma", 4, [2]),
        ("wagma, waiting", 3, [0]),
        ("wagma", 4, [1, 2, 3]),
        ("adpsgd", 3, [0]),
        ("eagersgd", 4, [1]),
    ],
)
def test_the_others_go_on_when_some_are_killed(
    run_ranks: RunRanks, label: str, world_size: int, victims: list[int]
) -> None:
    results = run_ranks(
        killed, world_size, label=label, victims=victims, may_die=victims, timeout_s=90
    )
    for rank, result in enumerate(results):
        if rank in victims:
            continue
        assert result["steps"] == 60
        assert result["finite"]


def come_back(rank: int, world_size: int, *, until: str) -> dict[str, Any]:
    """What the newcomer does. `until`: a file that it writes before it leaves."""
    net = make_net(seed=2)
    optimizer = sgd(net)
    with offbeat.attach(
        net, optimizer, offbeat.WAGMA(period=1, quorum=1.0, overlap=False)
    ) as session:
        taken, prints = fingerprint(net), []
        for step in range(session.start_step, session.start_step + 12):
            time.sleep(5e-3)
            train(net, optimizer, 2, range(step, step + 1))
            prints.append(fingerprint(net))
        Path(until).touch()
        session.finish()
    return {"taken": taken, "prints": prints, "start_step": session.start_step}


def as_at_first(world_size: int) -> dict[str, str]:
    """The environment of the last rank when it is started anew."""
    return launcher_environment(world_size - 1, world_size) | {
        RETURN_VARIABLE: "1",
        SECRET_VARIABLE: os.environ[SECRET_VARIABLE],
    }


def returns(rank: int, world_size: int, *, wanted: str, until: str) -> dict[str, Any]:
    """The last rank is killed, and rank 0 has it started anew as a process that joins the run. What
    does each hold after each step, before the average and after it?

    Everyone meets everyone in each version and waits for all. `wanted`: of the newcomer. `until`: a
    file that the newcomer writes.
    """
    os.environ[SECRET_VARIABLE] = "a secret of this test run only"
    has_asked = False
    net = make_net()
    optimizer = sgd(net)
    prints = []
    with offbeat.attach(
        net, optimizer, offbeat.WAGMA(period=1, quorum=1.0, overlap=False)
    ) as session:
        # Who waits for the others shows what it has before the average.
        call_first_after_steps(optimizer, lambda *_: prints.append(fingerprint(net)))
        for step in count():
            if rank == world_size - 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5e-3)  # emulated computation
            train(net, optimizer, rank, range(step, step + 1))
            prints.append(fingerprint(net))
            if (
                not has_asked
                and rank == 0
                and any("without worker" in notice for notice in session.notices)
            ):
                ask_for(wanted, as_at_first(world_size))
                has_asked = True
            if Path(until).exists():
                break
        session.finish()
        return {"prints": prints, "notices": list(session.notices)}


def test_a_worker_that_returns_is_equal_to_the_others_after_the_next_meeting(
    run_ranks: RunRanks, expect_newcomer: ExpectNewcomer, tmp_path: Path
) -> None:
    until = str(tmp_path / "returned")
    expected = expect_newcomer(come_back, until=until)
    first, second, _ = run_ranks(
        returns, 3, wanted=str(expected.wanted), until=until, may_die=[2], timeout_s=90
    )
    newcomer = expected.value()
    assert newcomer["start_step"] > 5
    assert newcomer["taken"] in [*first["prints"], *second["prints"]]
    together = set(first["prints"]) & set(second["prints"])
    assert set(newcomer["prints"][1:-1]) <= together
    assert any("with worker 2 come in" in notice for notice in first["notices"])


def ends_without_one(rank: int, world_size: int, *, label: str) -> dict[str, Any]:
    """Rank 1 is suspended, the others finish without it, and rank 0 wakes it afterwards. What does
    it hear, and after how many steps?
    """
    limits = PeerLimits(
        grace_s=0.2, heartbeat_interval_s=0.2, heartbeat_timeout_s=SILENCE_S, connect_timeout_s=10.0
    )
    session_module.Generations = partial(  # type: ignore[misc, assignment]
        Generations, interval_s=0.02, silence_s=SILENCE_S, limits=limits
    )
    pids = torch.zeros(world_size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    net = make_net()
    optimizer = sgd(net)
    num_steps = 0
    try:
        with offbeat.attach(net, optimizer, strategies()[label]) as session:
            for step in range(30):
                if rank == 1 and step == 10:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(2e-3)  # emulated computation
                train(net, optimizer, rank, range(step, step + 1))
                num_steps += 1
            session.finish()
    except PeerError as error:
        return {"steps": num_steps, "raised": str(error)}
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    return {"steps": num_steps, "raised": None}


@pytest.mark.parametrize("label", ["wagma", "eagersgd"])
def test_a_worker_that_comes_back_after_the_end_does_not_train_on_alone(
    run_ranks: RunRanks, label: str
) -> None:
    first, late, other = run_ranks(ends_without_one, 3, label=label)
    assert first["raised"] is other["raised"] is None
    assert "its model is not the run's" in late["raised"].replace("Its", "its")


def fails_in_its_loop(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 raises between steps. The others go on without it."""
    net = make_net()
    optimizer = sgd(net)
    try:
        with offbeat.attach(net, optimizer, offbeat.WAGMA(period=4)) as session:
            train(net, optimizer, rank, range(6))
            if rank == 1:
                raise RuntimeError("rank 1 had enough")
            train(net, optimizer, rank, range(6, 30))
            return {"steps": session.stats.steps}
    except RuntimeError as error:
        return {"raised": str(error)}


def test_the_others_go_on_when_one_raises(run_ranks: RunRanks) -> None:
    results = run_ranks(fails_in_its_loop, 3)
    assert results == [{"steps": 30}, {"raised": "rank 1 had enough"}, {"steps": 30}]


def refused(rank: int, world_size: int, *, faults: list[str]) -> list[dict[str, str]]:
    """Something cannot work, on every rank or on rank 1 alone. What does everyone hear?"""
    return [what_is_heard(rank, world_size, fault) for fault in faults]


def what_is_heard(rank: int, world_size: int, fault: str) -> dict[str, str]:
    net = make_net() if fault != "model" or rank != 1 else torch.nn.Linear(3, 3)
    before = fingerprint(net)
    try:
        strategy = {
            "group too large": lambda: offbeat.WAGMA(group_size=world_size + 1),
            "options": lambda: offbeat.WAGMA(period=5 if rank == 1 else 10),
            "model": lambda: offbeat.WAGMA(),
        }[fault]()
        offbeat.attach(net, sgd(net), strategy)
    except OffbeatError as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "touched": str(fingerprint(net) != before),
        }
    return {"kind": "none", "message": "", "touched": ""}


REFUSED = {
    "group too large": ("ConfigError", "group_size is 4, allowed is 2 to 3"),
    "options": ("MismatchError", "period=5"),
    "model": ("MismatchError", "model parameters"),
}


def test_what_cannot_work_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    for heard in run_ranks(refused, 3, faults=[*REFUSED]):
        for (fault, (kind, words)), result in zip(REFUSED.items(), heard, strict=True):
            assert result["kind"] == kind, fault
            assert words in result["message"], fault
            assert result["touched"] == "False", fault
