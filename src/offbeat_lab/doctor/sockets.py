"""Which sockets a process listens on."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Listening:
    """A TCP socket that accepts connections.

    Attributes:
        address: numeric.
        port: 1 to 65535.
        owner: who opened it: "offbeat", "process group" (PyTorch's), "rendezvous store" (PyTorch's)
            or "unknown".
        rank: whose process it is in.
    """

    address: str
    port: int
    owner: str = "unknown"
    rank: int = 0

    @property
    def is_open_to_all(self) -> bool:
        """Whether it accepts connections from every network that this host is on."""
        return ipaddress.ip_address(self.address).is_unspecified


def own_sockets() -> frozenset[tuple[str, int]]:
    """(address, port) of everything that this process listens on."""
    return _listening(psutil.Process().net_connections(kind="tcp"))


def sockets_at(port: int) -> frozenset[tuple[str, int]]:
    """(address, port) of every socket of this host's that listens at `port`, whoever owns it; empty
    where the system tells only the administrator, as macOS does.
    """
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return frozenset()
    return frozenset(found for found in _listening(connections) if found[1] == port)


def _listening(connections: Iterable[Any]) -> frozenset[tuple[str, int]]:
    return frozenset(
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    )
