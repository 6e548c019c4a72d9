"""What emulations have on this machine: whose it is, and how it goes away.

Namespaces and cgroups carry the number of the process that holds them. A number may be given out
again, so a small file says when the holder was started. Whatever belongs to a process that is there
is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat_lab.emulation.commands import NAMESPACES, MissingMeansError, run_batch
from offbeat_lab.emulation.plan import EmulationName
from offbeat_lab.emulation.quotas import find_hierarchies, members, remove_group

REGISTER = Path("/run/offbeat")
_END_S = 10.0  # how long a killed process may take to end
_STARTED = 19  # field 22 of /proc/PID/stat, counted from the one after the program's name


def claim() -> EmulationName:
    """A name that nothing on this machine has, held by this process.

    Raises:
        MissingMeansError: it cannot be written down.
    """
    taken = set(known_names())
    number = next(
        number
        for number in range(len(taken) + 1)
        if EmulationName(pid=os.getpid(), number=number) not in taken
    )
    name = EmulationName(pid=os.getpid(), number=number)
    try:
        REGISTER.mkdir(mode=0o755, exist_ok=True)
        (REGISTER / str(name)).write_text(_started(name.pid))
    except OSError as error:
        raise MissingMeansError(f"cannot write to {REGISTER}: {error.strerror or error}") from error
    return name


def clean() -> list[str]:
    """Remove what emulations have left whose process has ended, and end what still runs in it.

    Returns:
        Names of the namespaces and paths of the cgroups that were removed.

    Raises:
        ConfigError: there is something to remove, and this user may not.
    """
    removed = []
    for name in sorted(set(known_names()), key=str):
        if not is_held(name):
            try:
                removed += remove(name)
            except OSError as error:
                raise ConfigError(
                    f"cannot remove {name}: {error.strerror or error}; run offbeat lab clean as"
                    " root"
                ) from error
    return removed


def release(name: EmulationName) -> None:
    """Remove everything called `name` that this process holds; a child of it holds nothing."""
    if name.pid == os.getpid():
        remove(name)


def remove(name: EmulationName) -> list[str]:
    """Remove everything called `name`, ending the processes in it (never this one). Returns what
    there was.
    """
    namespaces = [
        entry.name for entry in _entries(NAMESPACES) if EmulationName.parse(entry.name) == name
    ]
    groups = [
        group for hierarchy in find_hierarchies() if (group := hierarchy.root / str(name)).is_dir()
    ]
    _end(_occupants(namespaces, groups) - {os.getpid()})
    run_batch("ip", [f"netns del {namespace}" for namespace in namespaces])
    removed = sorted(namespaces) + [str(group) for group in groups if remove_group(group)]
    with suppress(FileNotFoundError):
        (REGISTER / str(name)).unlink()
    return removed


def known_names() -> list[EmulationName]:
    """Of everything on this machine that an emulation made, repeatedly."""
    places = [NAMESPACES, REGISTER, *(hierarchy.root for hierarchy in find_hierarchies())]
    return [
        name
        for place in places
        for entry in _entries(place)
        if (name := EmulationName.parse(entry.name)) is not None
    ]


def _entries(place: Path) -> Iterable[Path]:
    return place.iterdir() if place.is_dir() else ()


def is_held(name: EmulationName) -> bool:
    """Whether the process that made `name` is there. In doubt it is."""
    try:
        started = _started(name.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    with suppress(FileNotFoundError):
        return (REGISTER / str(name)).read_text() == started
    return True


def _started(pid: int) -> str:
    """When a process was started, in ticks since the machine was."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTED]


def _occupants(namespaces: Iterable[str], groups: Iterable[Path]) -> set[int]:
    pids = {pid for group in groups for pid in members(group)}
    wanted = {(NAMESPACES / namespace).stat().st_ino for namespace in namespaces}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and wanted:
            with suppress(OSError):
                if (process / "ns" / "net").stat().st_ino in wanted:
                    pids.add(int(process.name))
    return pids


def _end(pids: set[int]) -> None:
    """Kill processes and wait until they have ended: a group cannot be removed before."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _END_S
    pause = threading.Event()
    while time.monotonic() < deadline_s and any(_runs(pid) for pid in pids):
        pause.wait(0.01)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
