"""Gloo within an emulated cluster: it finds its way, and its traffic goes over the links and
nowhere else.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab_support.links import sent_bytes
from offbeat.transport.interface import bound_socket
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.emulation import Emulation, emulate
from offbeat_lab.emulation.commands import MissingMeansError
from ranks_support.launch import Place, launch_in_places
from ranks_support.templates import Templates

pytestmark = pytest.mark.ranks

NUM_WORKERS = 4
NUM_FLOATS = 200_000
RATE_BIT_PER_S = 50e6  # which a busy machine can emulate too


def sum_over_links(rank: int, world_size: int, *, port: int) -> list[float]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    tensor = torch.full((NUM_FLOATS,), float(rank))
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.unique().tolist()


def test_dense_sums_cross_the_links_at_every_worker(templates: Templates, tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            cluster = Cluster(
                workers=NUM_WORKERS, link=LinkSpec(rate_bit_per_s=RATE_BIT_PER_S, latency_s=1e-4)
            )
            emulation = stack.enter_context(emulate(cluster, mode="namespaces"))
        except MissingMeansError as error:
            pytest.skip(str(error))
        before = [sent_bytes(emulation, worker) for worker in range(NUM_WORKERS)]
        port, store = emulation.call_inside(lambda: serve(emulation.store_address))
        places = [place(emulation, worker) for worker in range(NUM_WORKERS)]
        sums = launch_in_places(
            sum_over_links,
            places,
            templates=templates,
            directory=tmp_path,
            arguments={"port": port},
        )
        after = [sent_bytes(emulation, worker) for worker in range(NUM_WORKERS)]
        del store
    assert sums == [[float(sum(range(NUM_WORKERS)))]] * NUM_WORKERS
    ring = 2 * (NUM_WORKERS - 1) / NUM_WORKERS * 4 * NUM_FLOATS
    for first, last in zip(before, after, strict=True):
        assert ring <= last - first <= 1.5 * ring


def place(emulation: Emulation, worker: int) -> Place:
    placement = emulation.placement(worker)
    assert placement.namespace is not None
    return Place(environment=placement.environment, namespace=placement.namespace)


def serve(address: str) -> tuple[int, dist.Store]:
    listener = bound_socket(address)
    port: int = listener.getsockname()[1]
    return port, dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
