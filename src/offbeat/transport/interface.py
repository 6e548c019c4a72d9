"""Where to listen: on an address that was named, never on all of them by default, and on a port of
those that are allowed; and by which address peers come here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from offbeat.errors import ConfigError, nearest

T = TypeVar("T")

PORTS_VARIABLE: Final = "OFFBEAT_PORTS"
"""Environment variable with the ports that offbeat's sockets may listen on, such as
29600-29619."""

ADDRESS_VARIABLE: Final = "OFFBEAT_ADDRESS"
"""Environment variable with the address by which peers reach this host, where it is not the one
that sockets listen on."""

_LOOPBACK = "127.0.0.1"
_ROUTE_PORT = 9
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def listen_address() -> str:
    """The address that this process's sockets bind.

    The first of these decides: environment OFFBEAT_INTERFACE, then GLOO_SOCKET_IFNAME, each the
    name of a network interface ("eth0") or an address of this host ("10.0.0.7"); the local address
    from which MASTER_ADDR is reached; and 127.0.0.1 where there is no MASTER_ADDR.

    Returns:
        A numeric IPv4 or IPv6 address. The wildcards 0.0.0.0 and :: only when they are named.

    Raises:
        ConfigError: no such interface, or MASTER_ADDR cannot be resolved or reached; or
            OFFBEAT_PORTS or OFFBEAT_ADDRESS is malformed, which shows before a socket is needed.
    """
    allowed_ports()
    reachable_address(_LOOPBACK)
    for variable in ("OFFBEAT_INTERFACE", "GLOO_SOCKET_IFNAME"):
        # gloo accepts a list of names and uses the first for its rendezvous
        if name := os.environ.get(variable, "").split(",")[0].strip():
            return _address_of(name, variable)
    if master := os.environ.get("MASTER_ADDR"):
        return _address_towards(master)
    return _LOOPBACK


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, an IPv4 address of this host; None
    where none has it.
    """
    for _, name in socket.if_nameindex():
        with suppress(ConfigError, OSError):
            if _ipv4_of(name) == address:
                return name
    return None


def reachable_address(listens_at: str) -> str:
    """The address by which peers reach what listens at `listens_at` on this host: that one, unless
    OFFBEAT_ADDRESS names another, as behind a translation of addresses.

    Raises:
        ConfigError: it names none.
    """
    given = os.environ.get(ADDRESS_VARIABLE, "").strip()
    if not given:
        return listens_at
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        address = None
    if address is None or address.is_unspecified:
        raise ConfigError(
            f"{ADDRESS_VARIABLE} is {given!r}; allowed is the numeric address by which the other"
            " ranks reach this host, such as 203.0.113.7"
        )
    return str(address)


def allowed_ports() -> range | None:
    """The ports that OFFBEAT_PORTS allows; None where it is not set, and any will do.

    Raises:
        ConfigError: it is malformed.
    """
    given = os.environ.get(PORTS_VARIABLE, "").strip()
    if not given:
        return None
    first, _, last = given.partition("-")
    numbers = [int(end) if end.isdecimal() else 0 for end in (first.strip(), last.strip())]
    if not 0 < numbers[0] <= numbers[1] < 1 << 16:
        raise ConfigError(
            f"{PORTS_VARIABLE} is {given!r}; allowed are two ports, the first and the last of a"
            " range, such as 29600-29619"
        )
    return range(numbers[0], numbers[1] + 1)


def on_free_port(bind: Callable[[int], T], address: str) -> T:
    """What `bind` returns for a port that is free: one of OFFBEAT_PORTS, else any (0).

    Args:
        bind: listens on the port that it is given; raises `OSError`, with `errno.EADDRINUSE` where
            the port is taken.
        address: where, for the error.

    Raises:
        ConfigError: OFFBEAT_PORTS is malformed, or all of its ports are taken.
        OSError: of `bind`, for another reason than that.
    """
    ports = allowed_ports()
    if ports is None:
        return bind(0)
    # Not in order: the port of a worker that has died should not at once be another's, whom those
    # who still look for the dead one would reach.
    first = secrets.randbelow(len(ports))
    for port in (*ports[first:], *ports[:first]):
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"all ports of {PORTS_VARIABLE}, {ports[0]}-{ports[-1]}, are in use on {address}; give a"
        " larger range: four for each rank of this host and one for the store are enough"
    )


def bound_socket(address: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens on `address`, to be given to a server that would bind every
    interface by itself.

    Args:
        address: numeric address of this host, as from `listen_address`.
        port: port to listen on; 0 takes a free one (`socket.getsockname()[1]`), of those that
            OFFBEAT_PORTS allows.

    Returns:
        The socket. The caller closes it, or detaches it when the server takes its descriptor over.

    Raises:
        ConfigError: the address is not this host's, the port is taken, or no allowed one is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def listen(port: int) -> socket.socket:
        return socket.create_server((address, port), family=family)

    try:
        return listen(port) if port else on_free_port(listen, address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address} port {port}: {error.strerror or error}; name an address of"
            " this host and a free port (0 takes any)"
        ) from error


def _address_of(name: str, source: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(
            f"{source} is {name!r}, which is no address and no network interface of this host; it"
            f" has {', '.join(names)}{nearest(name, names)}"
        )
    return _ipv4_of(name)


def _ipv4_of(name: str) -> str:
    import fcntl  # not on every platform that can name an address instead

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
            )
        except OSError as error:
            raise ConfigError(
                f"interface {name!r} has no IPv4 address that can be read"
                f" ({error.strerror or error}); is it up? Give the address itself instead of the"
                " name"
            ) from error
    return socket.inet_ntoa(reply[20:24])


def _address_towards(master: str) -> str:
    """The address this host would use to reach `master`; asks the routing table, sends nothing."""
    try:
        family, _, _, _, where = socket.getaddrinfo(master, _ROUTE_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {master!r}, which this host cannot resolve or reach"
            f" ({error.strerror or error}); correct it, or name this host's interface in"
            " OFFBEAT_INTERFACE"
        ) from error
