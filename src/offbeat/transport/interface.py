"""Which address to listen on: one that was named, never all of them by default."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress

from offbeat.errors import ConfigError, nearest

_LOOPBACK = "127.0.0.1"
_ROUTE_PORT = 9
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def listen_address(interface: str | None = None) -> str:
    """The address that this process's sockets bind.

    Args:
        interface: name of a network interface ("eth0") or an address of this host ("10.0.0.7").
            Left out, the first of these decides: environment OFFBEAT_INTERFACE, GLOO_SOCKET_IFNAME,
            the local address from which MASTER_ADDR is reached, and 127.0.0.1 where there is no
            MASTER_ADDR.

    Returns:
        A numeric IPv4 or IPv6 address. The wildcards 0.0.0.0 and :: only when they are named.

    Raises:
        ConfigError: no such interface, or MASTER_ADDR cannot be resolved or reached.
    """
    if interface is not None:
        return _address_of(interface, "interface")
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


def bound_socket(address: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens on `address`, to be given to a server that would bind every
    interface by itself.

    Args:
        address: numeric address of this host, as from `listen_address`.
        port: port to listen on; 0 takes a free one (`socket.getsockname()[1]`).

    Returns:
        The socket. The caller closes it, or detaches it when the server takes its descriptor over.

    Raises:
        ConfigError: the address is not this host's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
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
