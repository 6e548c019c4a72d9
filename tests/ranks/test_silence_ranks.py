"""A rank that is frozen while its peers wait for it in a dense collective, as real processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import PeerError
from offbeat.session.attach import attach_through
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver
from offbeat.transport.link import SILENCE_VARIABLE
from rank_jobs.regression import make_net, train
from ranks_support.launch import RunRanks
from ranks_support.process import pause

pytestmark = pytest.mark.ranks

VICTIM = 2


def opened() -> list[str]:
    """The threads of process groups, and one word for each socket."""
    gc.collect()
    names = []
    for entry in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(entry.read_text().strip())
    files = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    sockets = ["socket" for entry in files if str(entry.readlink()).startswith("socket:")]
    return sorted(name for name in names if "gloo" in name) + sockets


def opened_beyond(before: list[str]) -> list[str]:
    """What is open now and was not before. It is looked at again for a while: the kernel lists a
    thread that has ended for a moment longer.
    """
    allowed = Counter(before) | Counter(pt_gloo_runloop=2)  # one that has not worked had no name
    for _ in range(1000):
        if not (more := Counter(opened()) - allowed):
            break
        pause()
    return sorted(more.elements())


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
    # Although the session is held, and with it the error and its traceback.
    after = opened_beyond(before)
    assert session.world_size == world_size
    if store.add("raised", 1) == world_size - 1:
        os.kill(int(store.get(f"pid/{VICTIM}")), signal.SIGKILL)
    return {"heard": heard, "left_open": after}


def test_a_frozen_rank_is_named_to_all_who_wait_for_it_in_a_dense_collective(
    run_ranks: RunRanks,
) -> None:
    recipe = offbeat.AllReduce()
    results = run_ranks(frozen, 3, strategy=recipe, may_die=[VICTIM], timeout_s=60)[:2]
    for result in results:
        assert result["heard"] == VICTIM
        assert result["left_open"] == []


SO_MAX_PACING_RATE = 47
"""Of Linux; the socket module does not have it."""


def slowed(driver: Driver) -> Driver:
    """Let this process's connections carry 2 MB a second."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            end = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with end:
            if end.type == socket.SOCK_STREAM:
                end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 2_000_000)
    return driver


def frozen_within_a_message(rank: int, world_size: int, *, victim: int) -> int | None:
    """`victim` is stopped while the model of rank 0 is on its way. Whom does the other one hear
    of?
    """
    os.environ[SILENCE_VARIABLE] = "1"
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    pid = int(store.get(f"pid/{victim}"))
    net = torch.nn.Linear(2048, 1024, bias=False)  # 8 MiB, of which sockets take a part at once
    with torch.no_grad():
        net.weight.fill_(float(rank + 1))
    received = net.weight.detach().view(-1)

    def stop_when_it_arrives() -> None:
        while float(received[0]) != 1.0:
            pause()
        os.kill(pid, signal.SIGSTOP)

    if rank == 1:
        threading.Thread(target=stop_when_it_arrives, daemon=True).start()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    try:
        with attach_through(slowed, net, optimizer, offbeat.AllReduce()):
            return None
    except PeerError as error:
        return error.rank
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket that can be slowed down")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_wait_in_the_middle_of_a_message_ends(run_ranks: RunRanks, victim: int) -> None:
    heard = run_ranks(frozen_within_a_message, 2, victim=victim, may_die=[victim])
    assert heard[1 - victim] == victim
