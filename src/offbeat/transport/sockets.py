"""This process's TCP sockets, found by their addresses.

gloo, ZeroMQ and the store of torch.distributed keep their sockets to themselves. Three things need
them all the same:

- gloo waits for ever for a peer that is frozen or cut off, and frees nothing when it is aborted.
  It ends every wait once the kernel says that the connection is over, so `shut_down` makes the
  kernel say so.
- A forked child, such as a worker of a DataLoader, holds a copy of every socket. A connection ends
  only when all copies are closed, so peers would take a rank that was killed for alive until its
  children have ended too. Sockets that are `closed_in_children` are closed there at once.
- A kernel that gets anything on a connection after it was closed resets it, and drops what it has
  not yet sent. ZeroMQ closes once the kernel has everything, and a peer's answer to a heartbeat may
  come at any time, so the last messages would be lost now and then. `finish_sending` closes later.

Descriptors are read from /dev/fd at that moment. A list made beforehand would be wrong: libraries
close and open sockets as connections come and go, and the kernel uses descriptors again. For the
same reason `second_handle` looks at a copy of the descriptor that ZeroMQ has told.
"""

from __future__ import annotations

import fcntl
import ipaddress
import math
import os
import socket
import stat
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

Address: TypeAlias = tuple[str, int]
"""Numeric host, and port."""

_DESCRIPTORS: Final = "/dev/fd"

_CONFIRMED_INTERVAL_S: Final = 0.01
"""How often to ask the kernel, which does not say by itself that a peer's host has everything."""

_IDLE_S: Final = 60
"""What lies between hosts, such as a translation of addresses, forgets connections that are silent
for a few minutes.
"""


@dataclass(frozen=True, slots=True)
class SocketAddresses:
    """Which sockets are meant.

    Attributes:
        local: sockets bound to one of these: those that listen there, and the connections that
            they have accepted.
        remote: sockets connected to one of these.
    """

    local: frozenset[Address] = frozenset()
    remote: frozenset[Address] = frozenset()

    def __or__(self, other: SocketAddresses) -> SocketAddresses:
        return SocketAddresses(self.local | other.local, self.remote | other.remote)

    def holds(self, end: socket.socket) -> bool:
        """Whether `end` is one of them."""
        return _address(end.getsockname) in self.local or _address(end.getpeername) in self.remote


def parsed_address(text: str) -> Address:
    """The address in "host:port", "[host]:port" or "tcp://host:port"."""
    host, _, port = text.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def listening_at(host: str) -> set[Address]:
    """The addresses of `host` at which this process listens."""
    return {here for here, _, listens in _ends() if listens and here[0] == host}


def of_service(port: int) -> SocketAddresses:
    """Where this process is connected to `port` of any host, and where it serves that port itself;
    for a service of which only the port is known.
    """
    serving, local, remote = False, set(), set()
    for here, there, listens in _ends():
        if here[1] == port:
            local.add(here)
            serving |= listens
        elif there is not None and there[1] == port:
            remote.add(there)
    return SocketAddresses(frozenset(local if serving else ()), frozenset(remote))


def ends_towards(port: int) -> frozenset[Address]:
    """This process's own ends of its connections to `port` of any host."""
    return frozenset(here for here, there, _ in _ends() if there is not None and there[1] == port)


def connections(*, but: SocketAddresses) -> list[tuple[Address, Address]]:
    """Both ends, this process's own first, of its connections, without those of `but`."""
    return [
        (here, there)
        for here, there, listens in _ends()
        if there is not None and not listens
        if here not in but.local and there not in but.remote
    ]


def limit_answers(which: SocketAddresses, seconds: float) -> SocketAddresses:
    """Let reads from these sockets, by whatever library, fail after so long without an answer; 0
    means never. Returns those that had another limit.
    """
    whole = int(seconds)
    limit = struct.pack("ll", whole, int(1e6 * (seconds - whole)))
    changed: set[Address] = set()
    for descriptor in _descriptors():
        with suppress(OSError), _end(descriptor) as end:
            if not which.holds(end) or _listens(end):
                continue
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(limit)) != limit:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                if (here := _address(end.getsockname)) is not None:
                    changed.add(here)
    return SocketAddresses(local=frozenset(changed))


def keep_alive(which: SocketAddresses) -> None:
    """Let the kernel show that these connections are in use, also while nothing is sent."""
    for descriptor in _descriptors():
        with suppress(OSError), _end(descriptor) as end:
            if which.holds(end) and not _listens(end):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):  # not on every platform
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)


def shut_down(which: SocketAddresses) -> None:
    """End these connections, at both of their ends, but go on listening. What waits for them, on
    any thread, is woken and fails. What was sent before is still delivered.
    """
    for descriptor in _descriptors():
        with suppress(OSError), copied_end(descriptor) as end:
            # gloo ends the process when its listening socket fails.
            if which.holds(end) and not _listens(end):
                end.shutdown(socket.SHUT_RDWR)


def second_handle(descriptor: int, remote: Address) -> socket.socket | None:
    """What keeps the connection to `remote` behind `descriptor` open when its owner closes it. None
    where there is no such connection any more.
    """
    with suppress(OSError), copied_end(descriptor) as end:
        if _address(end.getpeername) == remote:
            return end.dup()
    return None


def finish_sending(connection: socket.socket, patience_s: float) -> None:
    """Close a connection that nothing more will be sent on, once the peer's host has all that was
    sent or has closed it too.

    Args:
        connection: to be closed. What it receives is dropped.
        patience_s: for how long the host may confirm nothing until it is closed in any case.
    """
    with connection, suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_CONFIRMED_INTERVAL_S)
        least, deadline_s = math.inf, time.monotonic() + patience_s
        while (left := _num_unconfirmed(connection)) and (now_s := time.monotonic()) < deadline_s:
            if left < least:  # a slow link, but not a dead one
                least, deadline_s = left, now_s + patience_s
            with suppress(TimeoutError):
                if not connection.recv(1 << 16):
                    return


def _num_unconfirmed(connection: socket.socket) -> int:
    """How many bytes the peer's host may not have yet of what was sent; 1 where nobody knows."""
    try:
        unconfirmed = fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:  # a platform that does not say so for sockets
        return 1
    return int(struct.unpack("i", unconfirmed)[0])


def keep_from_programs(which: SocketAddresses) -> None:
    """Let no program that this process starts inherit these sockets."""
    for descriptor in _descriptors():
        with suppress(OSError), _end(descriptor) as end:
            if which.holds(end):
                os.set_inheritable(descriptor, False)


def closed_in_children(which: SocketAddresses) -> Callable[[], None]:
    """Have these sockets closed in every child that is forked from now on. The connections live on
    in this process.

    Returns:
        What ends this.
    """
    key = object()
    _owned[key] = which
    return lambda: _forget(key)


_owned: dict[object, SocketAddresses] = {}


def _forget(key: object) -> None:
    _owned.pop(key, None)


def _close_in_child() -> None:
    # No lock may be taken here: the thread that held it does not exist in the child.
    if not _owned:
        return
    which = SocketAddresses()
    for owned in list(_owned.values()):
        which |= owned
    _owned.clear()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _descriptors():
        with suppress(OSError):
            with _end(descriptor) as end:
                is_ours = which.holds(end)
            if is_ours:
                # The number stays in use: a destructor that runs in the child would otherwise close
                # whatever the child has opened under it. Closing, unlike `shutdown`, does not
                # concern the parent.
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_close_in_child)


def _descriptors() -> Iterator[int]:
    """The descriptors of this process that are sockets."""
    try:
        # In half the time of `Path.iterdir`.
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208
    except OSError:  # a platform without it
        return
    for descriptor in descriptors:
        with suppress(OSError):  # the one that the list was read by is closed already
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                yield descriptor


def _ends() -> Iterator[tuple[Address, Address | None, bool]]:
    """Of each socket of IP of this process its own address, its peer's, and whether it listens."""
    for descriptor in _descriptors():
        with suppress(OSError), _end(descriptor) as end:
            if (here := _address(end.getsockname)) is not None:
                yield here, _address(end.getpeername), _listens(end)


@contextmanager
def _end(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind `descriptor`, which stays open and as it is.

    Without the flag, Python would make it non-blocking where `socket.setdefaulttimeout` was used.
    """
    flag = getattr(socket, "SOCK_NONBLOCK", 0)
    end = socket.socket(type=socket.SOCK_STREAM | flag, proto=0, fileno=descriptor)
    try:
        yield end
    finally:
        end.detach()


@contextmanager
def copied_end(descriptor: int) -> Iterator[socket.socket]:
    """A socket that stands for the one behind `descriptor`. Its owner may close that meanwhile, and
    the number may come to mean something else, but the copy keeps its meaning.
    """
    copy = os.dup(descriptor)
    try:
        with _end(copy) as end:
            yield end
    finally:
        os.close(copy)


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(of: Callable[[], object]) -> Address | None:
    """What `getsockname` or `getpeername` says; None where there is no such address."""
    try:
        name = of()
    except OSError:
        return None
    if not isinstance(name, tuple) or len(name) < 2:
        return None  # not a socket of IP
    host, port = name[:2]
    return _numeric(str(host)), int(port)


@lru_cache  # a process has few hosts, and asks for all of its sockets' several times a session
def _numeric(host: str) -> str:
    """A host as `Address` has it: without a zone, and as IPv4 where IPv6 wraps that."""
    numeric = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(numeric, "ipv4_mapped", None) or numeric)
