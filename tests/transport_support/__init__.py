"""A proxy between two ranks' sockets, which may alter what the one sends to the other."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

GREETING_BYTES = 64
_LONG_SIZE = 0x02
_CHUNK_BYTES = 1 << 16

Alter: TypeAlias = Callable[[int, int, bytes], bytes | None]
"""By number of the connection, number of the frame and its bytes: what to send in its place; None
ends the connection. Frame 0 is the greeting, 1 and 2 are the handshake, then come messages.
"""


def unaltered(connection: int, number: int, frame: bytes) -> bytes:
    return frame


class FrameCutter:
    """Cuts what a ZeroMQ client sends into frames, each with its number."""

    def __init__(self) -> None:
        self._rest = b""
        self._num_greeted = 0
        self._num_frames = 0

    def cut(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete with `chunk`. The greeting comes as it does, since its
        beginning has to be answered first.
        """
        greeting = chunk[: GREETING_BYTES - self._num_greeted]
        self._num_greeted += len(greeting)
        self._rest += chunk[len(greeting) :]
        frames = [(0, greeting)] if greeting else []
        while (size := self._next_size()) is not None and size <= len(self._rest):
            self._num_frames += 1
            frames.append((self._num_frames, self._rest[:size]))
            self._rest = self._rest[size:]
        return frames

    def _next_size(self) -> int | None:
        """Of the next frame with its header; None where that is not known yet."""
        if len(self._rest) < 9:
            is_short = len(self._rest) > 1 and not self._rest[0] & _LONG_SIZE
            return 2 + self._rest[1] if is_short else None
        is_long = self._rest[0] & _LONG_SIZE
        return 9 + int.from_bytes(self._rest[1:9]) if is_long else 2 + self._rest[1]


class Proxy:
    """Listens on loopback and passes connections on to `target`; a context manager.

    Args:
        target: "tcp://address:port".
        alter: is asked for every frame that a client sends.

    Attributes:
        endpoint: where it listens, in the same form.
        sent: the frames that each client sent, as they were.
    """

    def __init__(self, target: str, alter: Alter = unaltered) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._alter = alter
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._wakeup, self._stop = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self.sent: list[list[bytes]] = []
        address, number = self._listening.getsockname()
        self.endpoint = f"tcp://{address}:{number}"
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.send(b"!")
        self._thread.join()
        for one in [*self._sockets, self._listening, self._wakeup, self._stop]:
            one.close()
        self._selector.close()

    def _run(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        server = socket.create_connection(self._target)
        self._sockets += [client, server]
        connection, cutter = len(self.sent), FrameCutter()
        self.sent.append([])

        def end() -> None:
            for one in (client, server):
                with suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

        def forward() -> None:
            try:
                chunk = client.recv(_CHUNK_BYTES)
                for number, frame in cutter.cut(chunk):
                    self.sent[connection].append(frame)
                    altered = self._alter(connection, number, frame)
                    if altered is None:
                        chunk = b""
                        break
                    server.sendall(altered)
            except OSError:
                chunk = b""
            if not chunk:
                end()

        def back() -> None:
            try:
                chunk = server.recv(_CHUNK_BYTES)
                client.sendall(chunk)
            except OSError:
                chunk = b""
            if not chunk:
                end()

        self._selector.register(client, selectors.EVENT_READ, forward)
        self._selector.register(server, selectors.EVENT_READ, back)
