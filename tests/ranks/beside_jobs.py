"""What the ranks of `test_beside_ranks.py` do. Each function runs in every process and returns
JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradient_jobs import fingerprint
from weight_jobs import make_net, sgd, train

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from offbeat.transport.network import bottom_of

LR = 0.125
NUM_STEPS = 24


def strategies() -> dict[str, AveragingStrategy]:
    return {
        "wagma": offbeat.WAGMA(period=4),
        "wagma, strict": offbeat.WAGMA(period=3, quorum=1.0),
        "wagma, waiting": offbeat.WAGMA(period=4, overlap=False, quorum=1.0),
        "wagma, pairs": offbeat.WAGMA(group_size=2, period=5),
        "wagma, fixed groups": offbeat.WAGMA(group_size=2, period=5, groups="fixed"),
        "wagma, no groups": offbeat.WAGMA(period=3, groups="off"),
        "adpsgd": offbeat.ADPSGD(),
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
            parts = session.state_dict()["parts"].values()
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


def killed(rank: int, world_size: int, *, label: str, victims: list[int]) -> dict[str, Any]:
    """Some ranks are killed in the middle of a step. How do the others fare?"""
    net = make_net()
    optimizer = sgd(net)
    draw = random.Random(rank)
    longest_s = 0.0
    with offbeat.attach(net, optimizer, strategies()[label]) as session:
        for step in range(60):
            if rank in victims and step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(draw.random() * 4e-3 + (0.05 if rank not in victims and step > 12 else 0))
            begin_s = time.monotonic()
            train(net, optimizer, rank, range(step, step + 1))
            longest_s = max(longest_s, time.monotonic() - begin_s)
        session.finish()
        finite = all(bool(t.isfinite().all()) for t in session.averaged_model().parameters())
        return {
            "steps": session.stats.steps,
            "finite": finite,
            "longest_s": longest_s,
            "notices": list(session.notices),
        }


def refused(rank: int, world_size: int, *, fault: str) -> dict[str, str]:
    """Something cannot work, on every rank or on rank 1 alone. What does everyone hear?"""
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


def returns(rank: int, world_size: int, *, until: str) -> dict[str, Any]:
    """The last rank is killed, and rank 0 starts it anew as a process that joins the run. What does
    each hold after each step, before the average and after it?

    Everyone meets everyone in each version and waits for all. `until`: a file that the newcomer
    writes its outcome to.
    """
    os.environ[SECRET_VARIABLE] = "a secret of this test run only"
    newcomer: subprocess.Popen[bytes] | None = None
    net = make_net()
    optimizer = sgd(net)
    prints = []
    optimizer.register_step_post_hook(
        lambda *_: prints.append(fingerprint(net))
    )  # who waits for the others shows this
    try:
        with offbeat.attach(
            net, optimizer, offbeat.WAGMA(period=1, quorum=1.0, overlap=False)
        ) as session:
            for step in range(2000):
                if rank == world_size - 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5e-3)  # emulated computation
                train(net, optimizer, rank, range(step, step + 1))
                prints.append(fingerprint(net))
                if (
                    newcomer is None
                    and rank == 0
                    and any("without worker" in notice for notice in session.notices)
                ):
                    newcomer = subprocess.Popen(
                        [sys.executable, __file__, until], env=os.environ | _as_at_first(world_size)
                    )
                if Path(until).exists():
                    break
            session.finish()
            return {"prints": prints, "notices": list(session.notices)}
    finally:
        if newcomer is not None:
            newcomer.wait()


def _as_at_first(world_size: int) -> dict[str, str]:
    """The environment of the last rank when it is started anew."""
    store = bottom_of(dist.distributed_c10d._get_default_store())
    place = {"RANK": str(world_size - 1), "WORLD_SIZE": str(world_size), RETURN_VARIABLE: "1"}
    return place | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
    }


def _come_back(until: str) -> None:
    """What the newcomer does."""
    torch.set_num_threads(1)
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
        part = Path(f"{until}.part")
        part.write_text(
            json.dumps({"taken": taken, "prints": prints, "start_step": session.start_step})
        )
        part.rename(until)
        session.finish()


if __name__ == "__main__":
    _come_back(sys.argv[1])
