"""Ports that are free, and a host that others see under another address than its own."""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

_LOOPBACK: Final = "127.0.0.1"
_FIRST, _LAST = 20000, 29000
"""Below those that the kernel gives to whoever asks for any."""


def free_ports(number: int) -> range:
    """So many ports of loopback, side by side, at which nobody listens now."""
    begin = _FIRST + os.getpid() * 97 % (_LAST - _FIRST)
    for first in (*range(begin, _LAST, number), *range(_FIRST, begin, number)):
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.create_server((_LOOPBACK, port)))
            return range(first, first + number)
    raise AssertionError(f"no {number} ports side by side are free")


@contextmanager
def relay(address: str, port: int) -> Iterator[list[object]]:
    """What connects to `port` of `address` is connected to the same port of 127.0.0.1.

    Yields the connections that came.
    """
    came: list[object] = []

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            came.append(self.client_address)
            with suppress(OSError), socket.create_connection((_LOOPBACK, port)) as inside:
                back = threading.Thread(target=_copy, args=(inside, self.request))
                back.start()
                _copy(self.request, inside)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    with Server((address, port), Relay) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield came
        finally:
            server.shutdown()
            serving.join()


def _copy(source: Any, target: Any) -> None:
    with suppress(OSError):
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        source.shutdown(socket.SHUT_RDWR)
