"""Real processes for a benchmark: each joins one gloo group, on loopback or behind a link of its
own, runs a function, and rank 0's result comes back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from offbeat.run.local_worker import Placement
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.emulation import emulate
from offbeat_lab.network_namespace import enter


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, link: LinkSpec | None = None
) -> Any:
    """`function(rank, world_size, *args)` in each of `world_size` processes. Returns what rank 0
    returned.

    Args:
        function: of the module that runs.
        world_size: how many.
        args: for all alike.
        link: the kernel's, of each rank, which needs network namespaces; None: loopback.
    """
    cluster = Cluster(workers=world_size, link=link or LinkSpec())
    with emulate(cluster, mode="none" if link is None else "namespaces") as emulation:
        placements = [emulation.placement(rank) for rank in range(world_size)]
        return _run_at(placements, function, args)


def _run_at(
    placements: Sequence[Placement], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(
            _join,
            args=(placements, str(Path(directory) / "store"), function, args, results),
            nprocs=len(placements),
        )
        return results.get()


def _join(
    rank: int,
    placements: Sequence[Placement],
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    world_size, here = len(placements), placements[rank]
    os.environ |= here.environment
    if here.namespace is not None:
        enter(here.namespace)  # this thread, and those that it starts
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        result = function(rank, world_size, *args)
        dist.barrier()
        if rank == 0:
            results.put(result)
    finally:
        dist.destroy_process_group()
