"""Where the ranks of a group find each other, group after group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


@contextmanager
def stores(count: int) -> Iterator[list[int]]:
    """The ports of so many stores: the keys of a group can be used once."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        ports = [listener.getsockname()[1] for listener in listeners]
        kept = [  # as long as the block lasts
            dist.TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )
            for port, listener in zip(ports, listeners, strict=True)
        ]
        yield ports
        kept.clear()


def find_by(port: int, rank: int, world_size: int) -> None:
    """What torchrun tells a process: the group that is made next is found through this store."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
