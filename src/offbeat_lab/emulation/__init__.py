"""A cluster made of local processes: the kernel gives each worker its link and its share of the
processors. Here is decided which kind of emulation a cluster gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from offbeat.errors import ConfigError
from offbeat.run.config import EmulationMode
from offbeat.run.coordination import LOOPBACK, ON_LOOPBACK
from offbeat.run.local_worker import Placement
from offbeat_lab.cluster import Cluster
from offbeat_lab.emulation.base import Emulation
from offbeat_lab.emulation.commands import MissingMeansError
from offbeat_lab.emulation.leftovers import clean
from offbeat_lab.emulation.namespaces import NamespaceEmulation
from offbeat_lab.emulation.quotas import open_compute
from offbeat_lab.records import EmulationReport

__all__ = ["Emulation", "Placement", "clean", "emulate"]


T = TypeVar("T")


def emulate(cluster: Cluster, *, mode: EmulationMode = "auto") -> Emulation:
    """Make `cluster` out of this machine. Close what is returned, or use it as a context manager.

    Args:
        cluster: what to emulate.
        mode: "namespaces" for the kernel, "delaying" where the workers delay messages by
            themselves, "none" for neither; "auto" takes the kernel where there is a network to
            emulate and it can be done, and delaying where it cannot.

    Raises:
        ConfigError: with "namespaces", what is missing for it; with it or "auto", a link that this
            machine cannot carry.
    """
    if cluster.racks is not None and mode != "none":
        raise ConfigError(
            f"cluster {cluster.name!r} has racks, which `offbeat plan` simulates and nothing"
            " emulates; leave racks out, or pass --emulation none"
        )
    if mode == "none" or (mode == "auto" and not needs_network(cluster)):
        return LoopbackEmulation(cluster, kind="none", limit_compute=mode != "none")
    if mode == "delaying":
        return LoopbackEmulation(cluster, kind="delaying")
    try:
        return NamespaceEmulation(cluster)
    except MissingMeansError as error:
        if mode == "namespaces":
            raise
        return LoopbackEmulation(cluster, kind="delaying", reason=str(error))


def needs_network(cluster: Cluster) -> bool:
    """Whether any link differs from loopback, or is cut at some time."""
    links = (cluster.link_of(worker) for worker in range(cluster.workers))
    return any(not link.is_plain for link in links) or any(
        fault.action == "cut" for fault in cluster.faults
    )


class LoopbackEmulation(Emulation):
    """No network is emulated by the kernel; speeds may be.

    Args:
        cluster: what to emulate.
        kind: "delaying" where the workers are to delay messages by themselves.
        reason: why the kernel does not do it, where it was asked to.
        limit_compute: whether workers of different speeds get quotas.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        kind: Literal["none", "delaying"],
        reason: str | None = None,
        limit_compute: bool = True,
    ) -> None:
        super().__init__()
        self.store_address = LOOPBACK
        notices = _network_notices(cluster, kind, reason)
        compute = open_compute(cluster, self._claim if limit_compute else None)
        self._quotas = compute.quotas
        delayed = "loopback; the workers deliver messages late"
        self.report = EmulationReport(
            kind=kind,
            network=delayed if kind == "delaying" else "loopback, not limited",
            compute=compute.words,
            speeds=compute.speeds,
            notices=notices + compute.notices,
        )

    def placement(self, worker: int) -> Placement:
        return Placement(environment={**ON_LOOPBACK, "MASTER_ADDR": LOOPBACK})

    def set_link(self, worker: int, *, up: bool) -> bool:
        return False

    def call_inside(self, function: Callable[[], T]) -> T:
        return function()


def _network_notices(
    cluster: Cluster, kind: Literal["none", "delaying"], reason: str | None
) -> list[str]:
    """What differs from the network of `cluster`."""
    notices: list[str] = []
    if needs_network(cluster) and kind == "none":
        notices.append("the network is not emulated: no emulation was asked for")
    if kind == "delaying":
        because = f": {reason}" if reason else ""
        notices.append(
            f"the kernel does not emulate the network{because}. In its place the workers deliver"
            " offbeat's messages late, and hold torch's collectives back for as long as a ring of"
            " such links would take"
        )
    if any(fault.action == "cut" for fault in cluster.faults):
        notices.append("links cannot be cut without network namespaces; such faults are left out")
    return notices
