"""Whether a process has ended, found out without its help: each rank listens on a socket that
nobody needs, and once the process is gone the kernel of its host refuses connections to it.

The kernel answers for a process that computes, waits or is stopped, so a refusal means that it has
ended. That holds while ranks connect, when no connection between them could tell yet.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, TypeVar

from offbeat.transport.interface import bound_socket, reachable_address
from offbeat.transport.sockets import Address, SocketAddresses, closed_in_children

Key = TypeVar("Key")

_ANSWER_S: Final = 0.5
"""How long a host may take to refuse; one that says nothing is not known to be without it."""


class Presence:
    """A socket that listens for as long as this process lives, or until `close`.

    Attributes:
        address: where peers find it.
    """

    def __init__(self, host: str) -> None:
        reached_at = reachable_address(host)
        self._socket = bound_socket(host)
        port = self._socket.getsockname()[1]
        self.address: Address = (reached_at, port)
        # A forked child would go on listening.
        self._forget = closed_in_children(SocketAddresses(local=frozenset([(host, port)])))

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._forget()
        self._socket.close()


def refused(addresses: Mapping[Key, Address]) -> set[Key]:
    """Which of these nobody listens at any more. Asks all of them at once, within half a second."""
    gone: set[Key] = set()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for key, address in addresses.items():
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            end = stack.enter_context(socket.socket(family))
            end.setblocking(False)
            match end.connect_ex(address):
                case errno.ECONNREFUSED:
                    gone.add(key)
                case errno.EINPROGRESS:
                    selector.register(end, selectors.EVENT_WRITE, (key, end))
        deadline_s = time.monotonic() + _ANSWER_S
        while selector.get_map():
            events = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not events:
                break
            for asked, _ in events:
                key, end = asked.data
                if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    gone.add(key)
                selector.unregister(end)
    return gone
