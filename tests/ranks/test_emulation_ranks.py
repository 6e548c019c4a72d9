"""Gloo within an emulated cluster: it finds its way, and its traffic goes over the links and
nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from offbeat.lab.cluster import Cluster, LinkSpec
from offbeat.lab.emulation import Emulation, emulate
from offbeat.lab.emulation.base import MissingMeansError
from offbeat.transport.interface import bound_socket

pytestmark = pytest.mark.ranks

NUM_WORKERS = 4
NUM_FLOATS = 1_000_000

WORKER = """
import os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
tensor = torch.full((int(sys.argv[1]),), float(rank))
dist.all_reduce(tensor)
print(tensor.unique().tolist())
dist.barrier()
dist.destroy_process_group()
"""


def test_dense_sums_cross_the_links_at_every_worker() -> None:
    with ExitStack() as stack:
        try:
            cluster = Cluster(
                workers=NUM_WORKERS, link=LinkSpec(rate_bit_per_s=500e6, latency_s=1e-4)
            )
            emulation = stack.enter_context(emulate(cluster, mode="namespaces"))
        except MissingMeansError as error:
            pytest.skip(str(error))
        before = [emulation.sent_bytes(worker) or 0 for worker in range(NUM_WORKERS)]
        port, store = emulation.call_inside(lambda: serve(emulation.store_address))
        processes = [
            stack.enter_context(start(emulation, worker, port)) for worker in range(NUM_WORKERS)
        ]
        stack.callback(end, processes)
        outputs = [process.communicate(timeout=100) for process in processes]
        after = [emulation.sent_bytes(worker) or 0 for worker in range(NUM_WORKERS)]
        del store
    for output, errors in outputs:
        assert output.strip() == str([float(sum(range(NUM_WORKERS)))]), errors
    ring = 2 * (NUM_WORKERS - 1) / NUM_WORKERS * 4 * NUM_FLOATS
    for first, last in zip(before, after, strict=True):
        assert ring <= last - first <= 1.5 * ring


def serve(address: str) -> tuple[int, dist.Store]:
    listener = bound_socket(address)
    port: int = listener.getsockname()[1]
    return port, dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def start(emulation: Emulation, worker: int, port: int) -> subprocess.Popen[str]:
    placement = emulation.placement(worker)
    place = {
        "RANK": str(worker),
        "WORLD_SIZE": str(NUM_WORKERS),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*placement.prefix, sys.executable, "-c", WORKER, str(NUM_FLOATS)],
        env=os.environ | dict(placement.environment) | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    emulation.admit(worker, process.pid)
    return process


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
