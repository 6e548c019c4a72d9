"""The process groups of PyTorch that dense operations are carried out on: gloo for CPU tensors and
NCCL for CUDA tensors.

They belong to one session and are never the user's own process group, so that nothing that is done
on them is ordered against the user's collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from offbeat.torch_private import new_gloo_device
from offbeat.transport.sockets import Address, listening_at

WAIT_LIMIT = timedelta(days=1)
"""A peer may be slow for long; that it is dead shows in its connections, and `Watch` ends waits."""

_MAX_TRIES = 5


Backend: TypeAlias = Any
"""A process group of gloo or NCCL, of which PyTorch's stubs do not say what both can do."""

BackendWork: TypeAlias = Any
"""Its handle of an operation under way, with `wait` and `is_completed`."""


@dataclass(frozen=True, slots=True)
class GlooDevice:
    """What gloo opens its sockets by.

    Attributes:
        handle: PyTorch's.
        listens_at: the address at which it lets peers connect; None where that cannot be found
            out, since the platform does not list a process's descriptors.
    """

    handle: object
    listens_at: Address | None


def gloo_device(host: str) -> GlooDevice:
    """A device that listens at a free port of `host`, a numeric address of this one."""
    before = listening_at(host)
    for _ in range(_MAX_TRIES):
        handle = new_gloo_device(host)
        # PyTorch does not tell the port. Where another thread began to listen at the same moment,
        # two are new, and the next device shows which.
        new = listening_at(host) - before
        if len(new) == 1:
            return GlooDevice(handle, new.pop())
        before |= new
    return GlooDevice(handle, None)
