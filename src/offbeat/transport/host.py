"""What this process may take of its host, of which a container or a batch system may leave it a
part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

MEMINFO: Final = Path("/proc/meminfo")
CGROUPS: Final = Path("/sys/fs/cgroup")
CGROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Those on which this process may compute, of however many its host has; in a container no more
    than it may take the time of.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min([cores, *processor_limits().values()])))


def free_bytes(device: torch.device) -> float:
    """Memory that they may still take; all there is where the system does not say."""
    if device.type == "cuda":
        # What PyTorch keeps for tensors to come is free too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    said = dict(line.split(":") for line in lines)
    free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if "MemAvailable" in said:  # what caches files is free too
        free = 1024 * float(said["MemAvailable"].split()[0])
    return min([free, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[float]:
    """What containers and batch systems leave to this process: the limit, less what is in use and
    caches no files, of each of its cgroups and of those around it.
    """
    for folder, is_first_version in _cgroups("memory"):
        names = "memory.max", "memory.current", "inactive_file"
        if is_first_version:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            stat = (folder / "memory.stat").read_text().splitlines()
            cached = int(dict(line.split() for line in stat).get(names[2], 0))
            yield float(max(0, limit - used + cached))


def processor_limits() -> dict[str, float]:
    """Of how many processors this process and the others of a cgroup together may take the time,
    by the cgroup: of each of its own, and of those around them, that has a limit.
    """
    found = {}
    for folder, is_first_version in _cgroups("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            said = " ".join((folder / name).read_text() for name in names)
            quota_us, period_us = map(int, said.split())
            if quota_us > 0:
                # Containers of a host call different folders by the same path.
                found[f"{names[0]} {folder.stat().st_ino}"] = quota_us / period_us
    return found


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroups that may limit what `controller` does, and of those
    around them; and whether they are of version 1, which has a hierarchy for each controller.
    """
    lines = CGROUPS_OF_PROCESS.read_text().splitlines() if CGROUPS_OF_PROCESS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):  # version 2 names none
            inside = Path(path.lstrip("/"))  # a container may not see it, but the root is its own
            for each in (inside, *inside.parents):
                yield CGROUPS / controllers / each, bool(controllers)
