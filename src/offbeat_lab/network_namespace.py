"""Entering a network namespace of Linux."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # linux/sched.h


def enter(namespace: Path) -> None:
    """Move the calling thread, and only it, into the network namespace whose file is `namespace`.
    There is no way back: let the thread end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(descriptor)
