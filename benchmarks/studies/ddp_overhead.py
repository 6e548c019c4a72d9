"""S-SGD through offbeat against DistributedDataParallel: seconds a training step, same model, same
data, on loopback.

Both train in the same processes, in turns, so that whatever disturbs the machine disturbs both.
Goal: at most 3% slower.

    python benchmarks/studies/ddp_overhead.py [--json]
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _benchmarks  # noqa: F401
import offbeat
from _ddp_script import MODELS
from _measure import Ratio, main, ratio
from _ranks import run_ranks

WORLD_SIZE = 2
NUM_PAIRS = 100
GOAL = 1.03


def step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    dist.barrier()
    begin_s = time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin_s


def pairs(rank: int, world_size: int, name: str) -> list[tuple[float, float]]:
    """(offbeat, DDP) seconds of one step each, by turns."""
    mine, theirs = MODELS[name](), MODELS[name]()
    mine_optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
    ddp = DistributedDataParallel(theirs)
    ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(32, 3, 32, 32)
    measured = []
    with offbeat.attach(mine, mine_optimizer, offbeat.AllReduce()):
        for turn in range(NUM_PAIRS + 5):
            # Whoever goes second finds warmer caches: take turns.
            if turn % 2:
                mine_s = step_s(mine, mine_optimizer, batch)
                theirs_s = step_s(ddp, ddp_optimizer, batch)
            else:
                theirs_s = step_s(ddp, ddp_optimizer, batch)
                mine_s = step_s(mine, mine_optimizer, batch)
            measured.append((mine_s, theirs_s))
    return measured[5:]


def cases(name: str) -> list[Ratio]:
    return [
        ratio(
            f"S-SGD against DDP, step time, {name}, {WORLD_SIZE} workers",
            run_ranks(pairs, WORLD_SIZE, name),
            at_most=GOAL,
            bound=1.0,
        )
    ]


if __name__ == "__main__":
    main({name: partial(cases, name) for name in MODELS})
