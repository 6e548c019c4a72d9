"""A rank that a scripted fault ends, as a job."""

from __future__ import annotations

from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.operations import Now
from transport_support.wrappers import Failing, ScriptedFault


def killed(rank: int, world_size: int) -> None:
    fault = ScriptedFault(rank=0, step=0, operation=Now, action="kill")
    Failing(VirtualCluster(1).drivers[0], [fault]).start(Now(), 0)
