"""Which sockets a process listens on, read from /proc."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"  # net/tcp_states.h


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
    """(address, port) of everything that this process listens on; empty where there is no /proc."""
    links = (_link(path) for path in Path("/proc/self/fd").glob("*"))
    mine = {
        link.removeprefix("socket:[").removesuffix("]")
        for link in links
        if link.startswith("socket:[")
    }
    return frozenset((address, port) for address, port, inode in _tables() if inode in mine)


def sockets_at(port: int) -> frozenset[tuple[str, int]]:
    """(address, port) of every socket of this host's that listens at `port`, whoever owns it."""
    return frozenset((address, found) for address, found, _ in _tables() if found == port)


def parse_table(text: str) -> Iterator[tuple[str, int, str]]:
    """(address, port, inode) of the sockets that listen, from the text of /proc/net/tcp or tcp6."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN:
            address, _, port = fields[1].partition(":")
            yield _address(address), int(port, 16), fields[9]


def _tables() -> Iterator[tuple[str, int, str]]:
    for name in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / name
        if path.exists():
            yield from parse_table(path.read_text())


def _address(digits: str) -> str:
    """The kernel prints words of 32 bits in the host's byte order, which is little-endian wherever
    torch runs.
    """
    raw = bytes.fromhex(digits)
    packed = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return str(ipaddress.ip_address(packed))


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # the descriptor of the listing itself is gone by now
        return ""
