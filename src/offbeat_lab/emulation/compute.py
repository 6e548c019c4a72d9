"""Differences of speed between workers: by quotas where the kernel keeps them, by sleeping where it
does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.errors import ConfigError
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.quantities import display_duration
from offbeat_lab.emulation.quotas import Quotas, needs_quotas, open_quotas, share_out, usable_cores
from offbeat_lab.records import Speeds


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeShares:
    """What makes the speeds of a cluster: `quotas` if the kernel does, and the same for
    the report.
    """

    quotas: Quotas | None = None
    speeds: Speeds = "equal"
    words: str = "not limited"
    notices: list[str] = field(default_factory=list)


def open_compute(cluster: Cluster, claim: Callable[[], str]) -> ComputeShares:
    """Quotas where `cluster` needs some, called what `claim` says."""
    if cluster.step_s is not None:
        words = f"padded by the workers: {display_duration(cluster.step_s)} a step at speed 1"
        return ComputeShares(speeds="padded", words=words)
    if not needs_quotas(cluster):
        return ComputeShares()
    try:
        quotas = open_quotas(cluster, claim())
    except ConfigError as error:
        notice = (
            f"no quotas of the processors: {error}; in their place slower workers sleep after they"
            " computed"
        )
        return ComputeShares(
            speeds="sleeping",
            words="slower workers sleep in proportion to what they compute",
            notices=[notice],
        )
    cores_per_speed = share_out(cluster, usable_cores())
    words = f"quotas of the processors by cgroups: {cores_per_speed:.2f} of a core at speed 1"
    return ComputeShares(quotas=quotas, speeds="quotas", words=words)
