"""The end of the dense side: no wait on gloo's connections outlives it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from offbeat.errors import PeerError
from offbeat.transport.backends import Backend, gloo_backend, gloo_device
from offbeat.transport.c10d import C10d
from offbeat.transport.operations import Broadcast
from offbeat.transport.sockets import SocketAddresses

LOOPBACK = "127.0.0.1"


def test_a_connection_that_gloo_reads_no_more_ends_too() -> None:
    store = HashStore()
    devices = [gloo_device(LOOPBACK) for _ in range(2)]
    first_at, second_at = (device.listens_at for device in devices)
    if first_at is None or second_at is None:
        pytest.skip("this platform does not list a process's descriptors")

    def opened(rank: int) -> Backend:
        return gloo_backend(store, rank, 2, device=devices[rank], connect_limit_s=30)

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.map(opened, range(2))
    # What a collective leaves behind that failed in the middle of a message: gloo reads no further.
    receiving.recv([torch.empty(4)], 0, 7)
    sending.send([torch.ones(4)], 1, 7).wait()

    sockets = SocketAddresses(local=frozenset([second_at]), remote=frozenset([first_at]))
    driver = C10d(receiving, sockets=sockets)
    del receiving
    raised: list[PeerError] = []

    def wait_for_rank_0() -> None:
        try:
            driver.start(Broadcast(torch.empty(4), root=0), 0).wait()
        except PeerError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait_for_rank_0, daemon=True)
    waiting.start()
    driver.cut(PeerError("rank 0 is dead", rank=0))
    waiting.join(60)
    assert [error.rank for error in raised] == [0]
    driver.close()
