"""How the lab's ranks make a process group: through a store that their supervisor serves, or
whatever torchrun or srun provides.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offbeat.errors import ConfigError
from offbeat.run.coordination import (
    PATIENCE,
    SUPERVISED_VARIABLE,
    Coordinator,
    supervised_coordinator,
)
from offbeat.transport.connect import launched, require_address


def join(backend: str = "gloo") -> Coordinator:
    """Initialise torch.distributed among the processes of this run. `leave` undoes it.

    A worker that comes back only finds the store: its peers made their process group without it.
    """
    launch = launched()
    if launch is None:
        raise ConfigError(
            "this process has no rank: RANK and WORLD_SIZE are not set; start it with torchrun or"
            " offbeat train"
        )
    if SUPERVISED_VARIABLE in os.environ:
        coordinator = supervised_coordinator()
    else:
        require_address(launch)
        os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size))
        where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        try:
            store, _, _ = next(rendezvous("env://", timeout=PATIENCE))
        except (RuntimeError, ValueError) as error:
            # A port is in use, a host is not there, or a number is none.
            raise ConfigError(
                f"the ranks cannot meet at {where}: {error}; name rank 0's host and a free port"
                " of it"
            ) from None
        coordinator = Coordinator(store, launch.rank, launch.world_size)
    if not coordinator.restart:
        dist.init_process_group(
            backend, store=coordinator.store, rank=launch.rank, world_size=launch.world_size
        )
    return coordinator


def leave() -> None:
    """Leave torch.distributed when all ranks are done: the rank that serves the store must not end
    while a peer still asks it.

    Where the supervisor serves the store no rank waits, so that none waits for a dead one.
    """
    if dist.is_initialized():
        if SUPERVISED_VARIABLE not in os.environ:
            dist.barrier()
        dist.destroy_process_group()
