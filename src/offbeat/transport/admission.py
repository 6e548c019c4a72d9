"""Who may connect to a listening socket, decided in a thread of its own.

Anybody who reaches the port can open connections and be silent, or send what is no handshake.
Three limits hold for those who have not shown a key of the run: how many there are (here), how long
they may take, and how large a frame they may announce (both in `listener`).
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from offbeat.transport.keys import ZAP_DOMAIN
from offbeat.transport.protection import Protection

SPARE_CONNECTIONS: Final = 32
"""Connections that a listening socket holds beside two of each rank, whose old one may not have
ended yet when the new one comes."""

_REQUESTS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"  # of ZeroMQ's authentication protocol, https://rfc.zeromq.org/spec/27


class Admission:
    """Answers which keys may come in, and ends connections that are too many.

    Make it before the socket is bound, and close the socket before it is stopped.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: zmq.Socket[bytes],
        protection: Protection,
    ) -> None:
        """Start the thread.

        Args:
            context: of the socket.
            listening: a server that is not bound yet.
            protection: says who comes in.
        """
        self._protection = protection
        self._most = 2 * protection.world_size + SPARE_CONNECTIONS
        self._listening = listening
        self._requests = context.socket(zmq.REP)
        self._requests.linger = 0
        self._requests.bind(_REQUESTS)
        self._events = listening.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stopped, self._stop = socket.socketpair()
        # The file descriptors of connections that are open.
        self._open: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="offbeat-admission", daemon=True)
        self._thread.start()

    def close_socket(self) -> None:
        """Close the socket."""
        # The I/O thread waits while it has more events to tell than the monitor holds, and
        # `disable_monitor` waits for the I/O thread: so the thread here still reads meanwhile.
        self._listening.disable_monitor()
        self._listening.close(linger=0)

    def stop(self) -> None:
        """End the thread."""
        self._stop.send(b"!")
        self._thread.join()
        for end in (self._stop, self._stopped):
            end.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._requests, self._events, self._stopped):
            poller.register(source, zmq.POLLIN)
        while self._stopped.fileno() not in (ready := dict(poller.poll())):
            if self._requests in ready:
                self._answer()
            elif self._events in ready:
                self._count()
        self._requests.close()
        self._events.close(linger=0)

    def _answer(self) -> None:
        """Say whether one client may come in, and as whom."""
        _, request, domain, _, _, mechanism, *credentials = self._requests.recv_multipart()
        # That the client has connected was told before. If it is to go, it goes before it is let
        # in, since a rank that is let in sends messages, which would be lost.
        self._count()
        user = b""
        if domain == ZAP_DOMAIN.encode():
            user = self._protection.user_id(mechanism, credentials)
        status, reason = (b"200", b"OK") if user else (b"400", b"Unknown key")
        self._requests.send_multipart([_VERSION, request, status, reason, user, b""])

    def _count(self) -> None:
        """Take in which connections came and went. Those that are too many end at once."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                continue
            self._open.add(descriptor)
            # The newest goes: those who came before may be ranks.
            if len(self._open) > self._most:
                _end_connection(descriptor, event["endpoint"].decode())


def _end_connection(descriptor: int, endpoint: str) -> None:
    """Let ZeroMQ find that the connection has ended. It then closes the descriptor, which is its
    own.
    """
    try:
        # A copy of the descriptor keeps its meaning while it is looked at: the connection may be
        # gone already, and the number stand for another file.
        copy = os.dup(descriptor)
    except OSError:
        return
    try:
        with socket.socket(fileno=copy) as connection:
            connection.getpeername()  # fails for the listening socket, which must not end
            if connection.getsockname()[1] == int(endpoint.rpartition(":")[2]):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
