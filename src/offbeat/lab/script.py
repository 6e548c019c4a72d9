"""What a cluster description says will happen while a run goes on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from offbeat.lab.cluster import Cluster, Fault, SpeedChange

SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
}
"""Faults that are a signal to the worker."""

UNDONE_BY: Final[Mapping[str, str]] = {"stop": "continue", "cut": "mend"}
"""Faults that may hold everybody up until another one."""


class Script:
    """What a cluster description says will happen during the run, in order of time."""

    def __init__(self, cluster: Cluster | None) -> None:
        actions: list[Fault | SpeedChange] = (
            [] if cluster is None else [*cluster.faults, *cluster.changes]
        )
        self.left = sorted(actions, key=lambda action: action.at_s)
        """What has not been given out yet."""

    def due(self, seconds: float) -> list[Fault | SpeedChange]:
        """What has become due by `seconds` of training and was not given out before."""
        due = [action for action in self.left if action.at_s <= seconds]
        self.left = self.left[len(due) :]
        return due
