"""Real processes for a benchmark: each joins one gloo group on loopback, runs a function, and rank
0's result comes back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """`function(rank, world_size, *args)` in each of `world_size` processes. Returns what rank 0
    returned.
    """
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OFFBEAT_INTERFACE": "127.0.0.1",
    }
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(
            _join,
            args=(world_size, str(Path(directory) / "store"), function, args, results),
            nprocs=world_size,
        )
        return results.get()


def _join(
    rank: int,
    world_size: int,
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        result = function(rank, world_size, *args)
        dist.barrier()
        if rank == 0:
            results.put(result)
    finally:
        dist.destroy_process_group()
