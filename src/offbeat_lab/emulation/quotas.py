"""Differences of speed between workers: by shares of the processors, a cgroup for each worker,
version 1 (`cpu.cfs_quota_us`) or 2 (`cpu.max`); by sleeping where the kernel keeps none.

A group may run for `quota` out of every `period`. The period is short: with the usual 100 ms a
worker of a quarter of a core would stand still for 75 ms at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.transport.host import usable_cores
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.quantities import display_duration
from offbeat_lab.records import Speeds

USED_SHARE = 0.8
"""Of all cores; the rest is for the network, the supervisor and the machine itself."""

_PERIOD_US = 10_000
_MAX_PERIOD_US = 1_000_000
_MIN_QUOTA_US = 1_000
"""Bounds that the kernel sets."""

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """Where cgroups with the cpu controller are made: `root` is mounted, `version` is 1 or 2."""

    root: Path
    version: int


class Quotas:
    """The groups of one emulation.

    Args:
        hierarchy: where to make them.
        name: of the group that holds one for each worker.
        speeds: by worker, as in the cluster description.
        cores_per_speed: share of a core that speed 1 stands for.

    Raises:
        OSError: they cannot be made. Nothing is left.
    """

    def __init__(
        self, hierarchy: Hierarchy, name: str, speeds: Sequence[float], *, cores_per_speed: float
    ) -> None:
        self._hierarchy = hierarchy
        self._group = hierarchy.root / name
        self._cores_per_speed = cores_per_speed
        try:
            if hierarchy.version == 2:
                _delegate(hierarchy.root)
            self._group.mkdir()
            if hierarchy.version == 2:
                _delegate(self._group)
            for worker, speed in enumerate(speeds):
                self._path(worker).mkdir()
                self.set_speed(worker, speed)
        except OSError:
            self.close()
            raise

    def admit(self, worker: int, pid: int) -> None:
        """Move the process `pid` into the group of `worker`. One that has ended meanwhile needs no
        share.
        """
        try:
            (self._path(worker) / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return

    def set_speed(self, worker: int, speed: float) -> None:
        quota_us, period_us = quota(speed * self._cores_per_speed)
        if self._hierarchy.version == 2:
            (self._path(worker) / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        group = self._path(worker)
        # The kernel checks each number against the other's old value.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))

    def close(self) -> None:
        """Remove the groups. Idempotent; processes still in them must have ended."""
        remove_group(self._group)

    def _path(self, worker: int) -> Path:
        return self._group / f"w{worker}"


def quota(cores: float) -> tuple[int, int]:
    """Quota and period in microseconds that let a group use `cores` of a core; at least a
    thousandth of one.
    """
    period_us = min(_MAX_PERIOD_US, max(_PERIOD_US, round(_MIN_QUOTA_US / cores)))
    return max(_MIN_QUOTA_US, round(cores * period_us)), period_us


def needs_quotas(cluster: Cluster) -> bool:
    """Whether speeds differ at some time and nothing else sees to it: padded workers keep to their
    speeds by themselves.
    """
    return cluster.step_s is None and (len(set(cluster.speeds)) > 1 or bool(cluster.changes))


def share_out(cluster: Cluster, num_cores: int) -> float:
    """Share of a core for speed 1, such that at no time all workers together use more than
    `USED_SHARE` of the machine.
    """
    fastest = [
        max(
            [
                cluster.speeds[worker],
                *(change.speed for change in cluster.changes if change.worker == worker),
            ]
        )
        for worker in range(cluster.workers)
    ]
    return min(1.0 / max(fastest), USED_SHARE * num_cores / sum(fastest))


def find_hierarchies() -> list[Hierarchy]:
    """Where the cpu controller is, if anywhere; the first is the one to use."""
    found = []
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else []:
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root = Path(fields.split()[4])
        if kind == "cgroup" and "cpu" in options.replace(" ", ",").split(","):
            found.append(Hierarchy(root=root, version=1))
        elif kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split():
            found.append(Hierarchy(root=root, version=2))
    return found


def remove_group(group: Path) -> bool:
    """Remove a cgroup and those directly below it. Returns whether there was one; raises `OSError`
    while one is in use.
    """
    if not group.is_dir():
        return False
    for path in (*(entry for entry in group.iterdir() if entry.is_dir()), group):
        path.rmdir()
    return True


def members(group: Path) -> set[int]:
    """Processes in a cgroup and those directly below it."""
    paths = (
        [group, *(entry for entry in group.iterdir() if entry.is_dir())] if group.is_dir() else []
    )
    return {int(pid) for path in paths for pid in (path / "cgroup.procs").read_text().split()}


def _delegate(group: Path) -> None:
    """Let groups below have the cpu controller."""
    if "cpu" not in (group / "cgroup.subtree_control").read_text().split():
        (group / "cgroup.subtree_control").write_text("+cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeShares:
    """What makes the speeds of a cluster: `quotas` if the kernel does, and the same for
    the report.
    """

    quotas: Quotas | None = None
    speeds: Speeds = "equal"
    words: str = "not limited"
    notices: list[str] = field(default_factory=list)


def open_compute(cluster: Cluster, claim: Callable[[], object] | None) -> ComputeShares:
    """Quotas where `cluster` needs some, called what `claim` says; None: there are to be none."""
    if cluster.step_s is not None:
        words = f"padded by the workers: {display_duration(cluster.step_s)} a step at speed 1"
        return ComputeShares(speeds="padded", words=words)
    if not needs_quotas(cluster):
        return ComputeShares()
    if claim is None:
        ignored = "speeds are not emulated: no emulation was asked for"
        return ComputeShares(speeds="ignored", notices=[ignored])
    hierarchies = find_hierarchies()
    speeds = [cluster.speed_at(worker, 0.0) for worker in range(cluster.workers)]
    cores_per_speed = share_out(cluster, usable_cores())
    try:
        if not hierarchies:
            raise OSError("no cgroup hierarchy with the cpu controller is mounted")
        quotas = Quotas(hierarchies[0], str(claim()), speeds, cores_per_speed=cores_per_speed)
    except (OSError, ConfigError) as error:
        notice = (
            f"no quotas of the processors: {error}; in their place slower workers sleep after they"
            " computed"
        )
        return ComputeShares(
            speeds="sleeping",
            words="slower workers sleep in proportion to what they compute",
            notices=[notice],
        )
    words = f"quotas of the processors by cgroups: {cores_per_speed:.2f} of a core at speed 1"
    return ComputeShares(quotas=quotas, speeds="quotas", words=words)
