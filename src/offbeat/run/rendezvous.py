"""How the lab's processes find each other: a store on loopback that the supervisor owns, or
whatever torchrun provides.
"""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offbeat.errors import ConfigError
from offbeat.run.coordination import Coordinator, record_death
from offbeat.transport.connect import RETURN_VARIABLE
from offbeat.transport.interface import bound_socket

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
_SUPERVISED = "OFFBEAT_STORE_PORT"
_PATIENCE = timedelta(
    minutes=30
)  # slowness is no failure: a dead worker is noticed by the process that started it


_numbers = count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process's place among those that torchrun or srun started."""

    rank: int
    world_size: int


class RunStore(ABC):
    """The store of a run, as the supervisor of some of its workers sees it.

    Attributes:
        address, port: at which workers reach it.
    """

    address: str
    port: int

    def __init__(self, store: Store) -> None:
        self._store: Store | None = store

    @property
    def store(self) -> Store:
        """The store itself."""
        assert self._store is not None, "it is closed"
        return self._store

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """What worker `rank` needs to find the store, in the variables that torch.distributed knows
        too.
        """
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        return place | {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            _SUPERVISED: str(self.port),
        }

    def record_death(self, rank: int, *, deaths: int) -> None:
        """Tell all ranks that the process of `rank` has died, for the `deaths`-th time."""
        record_death(self.store, rank, deaths=deaths)

    def close(self) -> None:
        self._store = None


class StoreServer(RunStore):
    """The store, in this process, on a socket that listens on `address` only.

    Args:
        address: of this host.
        port: 0 takes a free one.
    """

    def __init__(self, address: str = LOOPBACK, port: int = 0) -> None:
        self.address = address
        with bound_socket(address, port) as listener:
            self.port = listener.getsockname()[1]
            # Given only an address, the store would listen on every interface.
            super().__init__(
                dist.TCPStore(
                    address,
                    self.port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(listener.fileno()),
                )
            )


class StoreClient(RunStore):
    """The store that another host's supervisor serves. Waits for it.

    Args:
        address, port: where it is.

    Raises:
        ConfigError: nobody serves one there.
    """

    def __init__(self, address: str, port: int) -> None:
        self.address, self.port = address, port
        try:
            super().__init__(
                dist.TCPStore(
                    address, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE
                )
            )
        except RuntimeError as error:
            raise ConfigError(
                f"no supervisor serves a store at {address} port {port} ({error}); start offbeat"
                " run --node-rank 0 there"
            ) from None


def launched() -> Launch | None:
    """This process's place, when torchrun or srun started it; None when it was started alone."""
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
        if rank.isdigit() and size.isdigit() and (rank_name == "RANK" or int(size) > 1):
            return Launch(rank=int(rank), world_size=int(size))
    return None


def join() -> Coordinator:
    """Initialise torch.distributed (gloo) among the processes of this run. `leave` undoes it.

    A worker that comes back only finds the store: its peers made their process group without it.
    """
    launch = launched()
    if launch is None:
        raise ConfigError(
            "this process has no rank: RANK and WORLD_SIZE are not set; start it with torchrun or"
            " offbeat train"
        )
    supervised, restart = _SUPERVISED in os.environ, int(os.environ.get(RETURN_VARIABLE) or 0)
    if supervised:
        store = _supervisors_store()
    else:
        _require(("MASTER_ADDR", "MASTER_PORT"), launch)
        os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size))
        where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        try:
            store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
        except (
            RuntimeError,
            ValueError,
        ) as error:  # a port in use, a host that is not there, a number that is none
            raise ConfigError(
                f"the ranks cannot meet at {where}: {error}; name rank 0's host and a free port"
                " of it"
            ) from None
    if not restart:
        dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
    return Coordinator(
        store, launch.rank, launch.world_size, restart=restart, supervised=supervised
    )


def supervised_coordinator() -> Coordinator | None:
    """That of a worker which a supervisor of offbeat's has started, and which makes a process group
    by itself; None elsewhere.
    """
    launch = launched()
    if launch is None or _SUPERVISED not in os.environ:
        return None
    return Coordinator(
        _supervisors_store(),
        launch.rank,
        launch.world_size,
        restart=int(os.environ.get(RETURN_VARIABLE) or 0),
        supervised=True,
    )


def group_coordinator() -> Coordinator:
    """One of the ranks of torch.distributed's default group, or of this process alone; a new one at
    each call, which all ranks make in the same order.
    """
    if not dist.is_initialized():
        return Coordinator(dist.HashStore(), 0, 1)
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    own = dist.PrefixStore(f"offbeat-record-{next(_numbers)}", store)
    return Coordinator(own, dist.get_rank(), dist.get_world_size())


def _supervisors_store() -> Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ[_SUPERVISED]),
        is_master=False,
        wait_for_workers=False,
        timeout=_PATIENCE,
    )


def leave() -> None:
    """Leave torch.distributed when all ranks are done: the rank that serves the store must not end
    while a peer still asks it.

    Where the supervisor serves the store no rank waits, so that none waits for a dead one.
    """
    if dist.is_initialized():
        if _SUPERVISED not in os.environ:
            dist.barrier()
        dist.destroy_process_group()


def _require(names: Sequence[str], launch: Launch) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this is rank {launch.rank} of {launch.world_size}, but {' and '.join(missing)} is not"
            " set; export the address and a free port of rank 0's host"
        )
