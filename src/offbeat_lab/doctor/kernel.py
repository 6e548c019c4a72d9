"""Tries what the kernel can do, where it disturbs no one: a network namespace, queues on its
loopback, an empty cgroup.

All of it is taken away again before these functions return.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_TIMEOUT_S = 10.0
_QDISCS: Final[Mapping[str, tuple[str, ...]]] = {
    "tbf": ("rate", "1gbit", "burst", "128kb", "limit", "512kb"),
    "fq": (),
    "netem": ("delay", "1ms"),
}


def try_kernel() -> dict[str, str | None]:
    """What stands in the way of network namespaces and of each queueing discipline; None where it
    works.

    Needs the privileges, `ip` and `tc`. Without namespaces nothing else is tried.
    """
    name = scratch_name()
    failure = _run("ip", "netns", "add", name)
    if failure is not None:
        return {"namespaces": failure}
    try:
        return {"namespaces": None} | {
            qdisc: _run("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", qdisc, *options)
            for qdisc, options in _QDISCS.items()
        }
    finally:
        _run("ip", "netns", "delete", name)


def try_writing(directory: Path) -> str | None:
    """What stands in the way of making a cgroup in `directory`; None when it can be done."""
    path = directory / scratch_name()
    try:
        path.mkdir()
        path.rmdir()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def scratch_name() -> str:
    """What this process calls what it makes to try and takes away again."""
    return f"offbeat-doctor-{os.getpid()}"


def _run(*command: str) -> str | None:
    """The last line that the command complains with; None when it succeeds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    complaint = next(
        reversed(done.stderr.strip().splitlines()),
        f"{command[0]} exited with status {done.returncode}",
    )
    return complaint.removeprefix("Error: ").rstrip(".")
