"""A member of a run that only takes part in its membership, as a job of a rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore

from offbeat.membership.generations import Generations
from offbeat.transport.link import PeerLimits
from offbeat.transport.network import Network
from offbeat.transport.peers import Peers
from ranks_support.rank import LOOPBACK

if TYPE_CHECKING:
    from offbeat.membership.agreement import Generation
    from offbeat.transport.driver import Driver

PREFIX = "run"


def has_begun(rank: int) -> str:
    """The key that a member writes into the store once it is in its first generation, and has
    connections to all others.
    """
    return f"has begun/{rank}"


class Quiet:
    """A host that does nothing but hold its newest mesh."""

    driver: Peers | None = None

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        assert isinstance(driver, Peers)
        if self.driver is not None:
            self.driver.close()
        self.driver = driver

    def unreachable(self) -> frozenset[int]:
        assert self.driver is not None
        return frozenset([*self.driver.dead(), *self.driver.left()])

    def expelled(self) -> None:
        pass

    def may_return(self) -> bool:
        return True

    def lost_store(self, reason: str) -> None:
        pass

    def found_store(self) -> None:
        pass

    def run_over(self) -> None:
        pass

    def retired(self, reason: str) -> None:
        pass


def be_a_member(
    rank: int,
    world_size: int,
    *,
    port: int,
    secret: str,
    limits: PeerLimits,
    silence_s: float,
    joins: bool,
) -> None:
    """Be one until killed.

    Args:
        rank, world_size: of this process.
        port: where the run's store listens.
        secret: of the run.
        limits: of the mesh.
        silence_s: after how long a silent member is dead.
        joins: whether the run was founded without this process.
    """
    shared = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    store = PrefixStore(PREFIX, shared)
    network = Network(
        store=store, rank=rank, world_size=world_size, address=LOOPBACK, secret=secret.encode()
    )
    host = Quiet()
    generations = Generations(network, host, interval_s=0.05, silence_s=silence_s, limits=limits)
    if joins:
        generations.join("{}", timeout_s=60.0)
    else:
        generations.start("{}")
    assert host.driver is not None
    host.driver.await_connections(60.0)
    store.set(has_begun(rank), "")
    threading.Event().wait()
