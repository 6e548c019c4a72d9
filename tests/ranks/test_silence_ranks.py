"""A rank that is frozen while its peers wait for it in a dense collective, as real processes."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import PeerError
from offbeat.strategies.base import Strategy
from offbeat.transport.silence import SILENCE_VARIABLE
from rank_jobs.regression import make_net, train
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

VICTIM = 2


def opened() -> list[str]:
    """The threads of process groups, and one word for each socket."""
    gc.collect()
    names = [entry.read_text().strip() for entry in Path("/proc/self/task").glob("*/comm")]
    files = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    sockets = ["socket" for entry in files if str(entry.readlink()).startswith("socket:")]
    return sorted(name for name in names if "gloo" in name) + sockets


def frozen(rank: int, world_size: int, *, strategy: Strategy) -> dict[str, Any]:
    """The last rank is stopped in the third step. What do the others hear, and what is left of the
    session?
    """
    os.environ[SILENCE_VARIABLE] = "2"
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    dist.barrier()  # the group's own threads have names once they have worked
    before = opened()
    heard = None
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    try:
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(2))
            if rank == VICTIM:
                os.kill(os.getpid(), signal.SIGSTOP)
            train(net, optimizer, rank, range(2, 6))
    except PeerError as error:
        heard = error.rank
    after = opened()  # although the session is held, and with it the error and its traceback
    assert session.world_size == world_size
    if store.add("raised", 1) == world_size - 1:
        os.kill(int(store.get(f"pid/{VICTIM}")), signal.SIGKILL)
    return {"heard": heard, "open": [before, after]}


def test_a_frozen_rank_is_named_to_all_who_wait_for_it_in_a_dense_collective(
    run_ranks: RunRanks,
) -> None:
    recipe = offbeat.AllReduce()
    results = run_ranks(frozen, 3, strategy=recipe, may_die=[VICTIM], timeout_s=25)[:2]
    for result in results:
        assert result["heard"] == VICTIM
        before, after = map(Counter, result["open"])
        assert after <= before
