"""Threads as Linux knows them: which ones send and receive, and which come first. Linux has a
priority for each thread. Elsewhere nothing is known, and nothing is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import zmq

_TASKS = Path("/proc/self/task")
_PREFIX = 190
_TRANSPORT = f"{_PREFIX}/ZMQbg/IO"
"""How the names of the threads begin that send, receive and encrypt for `new_context`."""

_LOWEST = 19


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of ZeroMQ whose threads `transport_threads` finds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with suppress(zmq.ZMQError):  # a library that gives no names
        context.set(zmq.THREAD_NAME_PREFIX, _PREFIX)
    return context


def transport_threads() -> frozenset[int]:
    """The native identifiers of the threads of this process that send and receive for offbeat; none
    where they are not known.
    """
    found = set()
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has ended
                if (task / "comm").read_text().startswith(_TRANSPORT):
                    found.add(int(task.name))
    return frozenset(found)


def let_others_first(threads: Iterable[int], levels: int) -> None:
    """Let other threads of the machine run before these where there are too few processors.

    Args:
        threads: native identifiers, of threads of this process.
        levels: by how much their nice value becomes larger than that of the calling thread.
    """
    if sys.platform != "linux":  # where it would concern the whole process
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0) + levels
    for thread in threads:
        with suppress(OSError):  # it has ended, or has a lower priority already
            os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, nice))
