"""One rank, which has its `Orders` and a process of its own.

Joins the gloo group, calls the function, and writes its outcome as JSON to the pipe. At SIGABRT it
prints the stacks of all its threads and ends; so it does by itself after `Orders.limit_s`, in case
the test is gone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ranks_support import references

LOOPBACK = "127.0.0.1"
STORE_PORT_VARIABLE = "OFFBEAT_TEST_STORE_PORT"
"""Where the store of a rank's group listens, for jobs that play a launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Who this rank is and what it does: `job` is its function and the arguments that follow (rank,
    world_size), in the form of `references`. With `store_port` 0 there is no store, and the job
    meets its peers by itself.
    """

    rank: int
    world_size: int
    store_port: int
    result_fd: int
    limit_s: float
    job: str


def carry_out(orders: Orders) -> Any:
    job = references.loads(orders.job)
    if not orders.store_port:
        return job["function"](orders.rank, orders.world_size, **job["arguments"])
    store = dist.TCPStore(LOOPBACK, orders.store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=orders.rank, world_size=orders.world_size)
    if store.add("num_joined", 1) == orders.world_size:
        store.set("all_joined", "")
    store.wait(
        ["all_joined"]
    )  # who has joined first may return and leave before the last one is connected
    try:
        os.write(orders.result_fd, b"\n")  # says that this rank has joined
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return job["function"](orders.rank, orders.world_size, **job["arguments"])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(orders: Orders) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.dump_traceback_later(orders.limit_s, exit=True)
    os.set_inheritable(orders.result_fd, False)
    torch.set_num_threads(1)
    try:
        outcome = json.dumps({"value": carry_out(orders)})
    except BaseException as error:  # noqa: BLE001 - the test is told of it
        kind = traceback.format_exception_only(error)[0].splitlines()[0]
        outcome = json.dumps({"raised": kind, "traceback": traceback.format_exc()})
    # The descriptor stays open until the process has ended: that is how the test sees the end of
    # it.
    with open(orders.result_fd, "w", closefd=False) as pipe:
        pipe.write(f"{outcome}\n")
