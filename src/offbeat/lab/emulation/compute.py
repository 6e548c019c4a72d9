"""Differences of speed between workers: by quotas where the kernel keeps them, in words where it does not."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.errors import ConfigError
from offbeat.lab.cluster import Cluster
from offbeat.lab.cluster.quantities import display_duration
from offbeat.lab.emulation.quotas import Quotas, needs_quotas, open_quotas, share_out, usable_cores


def open_compute(cluster: Cluster, claim: Callable[[], str]) -> tuple[Quotas | None, str, list[str]]:
    """Quotas where `cluster` needs some, called what `claim` says; a sentence about its compute; what could not be done."""
    if cluster.step_s is not None:
        return None, f"padded by the workers: {display_duration(cluster.step_s)} a step at speed 1", []
    if not needs_quotas(cluster):
        return None, "not limited", []
    try:
        quotas = open_quotas(cluster, claim())
    except ConfigError as error:
        notice = f"speeds are not emulated: {error}; run as root, or let steps be padded (--step-time 200ms)"
        return None, "not limited, though speeds differ", [notice]
    cores_per_speed = share_out(cluster, usable_cores())
    return quotas, f"quotas of the processors by cgroups: {cores_per_speed:.2f} of a core at speed 1", []
