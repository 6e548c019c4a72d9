"""What a cluster description says will happen while a run goes on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from offbeat_lab.cluster import Cluster, ClusterFault, SpeedChange

SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}
"""Faults that are a signal to the worker."""

UNDONE_BY: Final[Mapping[str, str]] = {"stop": "continue", "cut": "mend"}
"""Faults that may hold all workers up until the fault that undoes them."""


class ScheduledEvents:
    """Faults and changes of speed that a cluster description asks for, in order of time."""

    def __init__(self, cluster: Cluster | None) -> None:
        actions: list[ClusterFault | SpeedChange] = (
            [] if cluster is None else [*cluster.faults, *cluster.changes]
        )
        self.remaining = sorted(actions, key=lambda action: action.at_s)
        """Events that `due` has not returned yet."""

    def due(self, seconds: float) -> list[ClusterFault | SpeedChange]:
        """Events that are due by `seconds` of training and were not returned before."""
        due = [action for action in self.remaining if action.at_s <= seconds]
        self.remaining = self.remaining[len(due) :]
        return due
