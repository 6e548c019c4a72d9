"""Emulation of a described cluster."""
from offbeat.lab.cluster import Cluster
from offbeat.lab.emulation.base import Emulation, Placement, Plain
from offbeat.lab.emulation.report import EmulationMode, EmulationReport, LinkCheck


def emulate(cluster: Cluster, *, mode: EmulationMode = "auto") -> Emulation:
    """An emulation of `cluster`."""
    if cluster.is_plain or mode == "none":
        return Plain(EmulationReport(kind="none", network="this machine's loopback", compute="this machine's cores"))
    return Plain(EmulationReport(kind="delaying", network="delays in user space", compute="sleeps"))
