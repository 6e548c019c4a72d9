"""What a test may not leave behind: threads, process groups, changed environment variables."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

END_WITHIN_S = 20.0
"""How long a thread that was told to stop may take to do so on a busy machine."""

NOT_OURS = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "KMP_DUPLICATE_LIB_OK",  # set by scikit-learn when it is imported
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",  # set by torch.compile when it is first used
        "TRITON_CACHE_DIR",
    }
)


class LeakError(AssertionError):
    """Something was left behind."""


@contextmanager
def no_leaks() -> Iterator[None]:
    """Raises `LeakError` when the block is left with more than it was entered with; takes away what
    can be taken away.
    """
    threads, grouped, environment = set(threading.enumerate()), dist.is_initialized(), settings()
    yield
    leaks = [f"thread {thread.name!r}" for thread in left_running(threads)]
    if dist.is_initialized() and not grouped:
        dist.destroy_process_group()
        leaks.append("the default process group")
    for name in sorted(environment.keys() | settings().keys()):
        before, after = environment.get(name), os.environ.get(name)
        if before != after:
            leaks.append(f"environment variable {name} ({before!r} before, {after!r} after)")
            os.environ.pop(name) if before is None else os.environ.update({name: before})
    if leaks:
        raise LeakError(f"left behind: {', '.join(leaks)}")


LIBRARY_THREADS = ("GarbageCollectorThread",)
"""Classes of threads that a library keeps for the life of the process: pyzmq's, from the first
zero-copy send on.
"""


def left_running(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads begun since that go on. Those that C++ began are the library's, and only Python's
    view of them is new.
    """
    begun = [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and not isinstance(thread, threading._DummyThread)
        and type(thread).__name__ not in LIBRARY_THREADS
    ]
    for thread in begun:
        thread.join(END_WITHIN_S)
    return [thread for thread in begun if thread.is_alive()]


def settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}
