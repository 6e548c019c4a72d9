"""A connection to the run's store whose calls always end.

PyTorch's client waits without end for an answer when the process that serves the store is frozen or
cut off. The kernel can limit that wait. After it the connection has to go: the answer may still
come, and would be taken for that of the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store
from typing_extensions import override

from offbeat.transport.sockets import SocketAddresses, ends_towards, limit_answers, shut_down

T = TypeVar("T")

_opening = threading.Lock()


class OwnStore(Store):
    """Passes calls on to a connection that nobody else uses.

    Its calls raise `RuntimeError` after `limit_s` without an answer, and from then on.
    """

    def __init__(self, open_client: Callable[[], Store], *, port: int, limit_s: float) -> None:
        """Open the connection.

        Args:
            open_client: makes the client.
            port: of the server.
            limit_s: how long the server may be silent, > 0.

        Raises:
            RuntimeError: the store does not answer.
        """
        super().__init__()
        with _opening:  # else the connection of another thread would look like this one
            before = ends_towards(port)
            self._client = open_client()
            self._sockets = SocketAddresses(local=ends_towards(port) - before)
        self._client.set_timeout(timedelta(seconds=limit_s))
        limit_answers(self._sockets, limit_s)

    @override
    def set(self, key: str, value: str) -> None:
        self._answered(lambda: self._client.set(key, value))

    @override
    def get(self, key: str) -> bytes:
        return self._answered(lambda: self._client.get(key))

    @override
    def add(self, key: str, value: int) -> int:
        return self._answered(lambda: self._client.add(key, value))

    @override
    def check(self, keys: list[str]) -> bool:
        return self._answered(lambda: self._client.check(keys))

    @override
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._answered(lambda: self._client.compare_set(key, expected_value, desired_value))

    @override
    def delete_key(self, key: str) -> bool:
        return self._answered(lambda: self._client.delete_key(key))

    @override
    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._answered(lambda: self._client.multi_get(keys))

    def _answered(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except dist.DistNetworkError:
            shut_down(self._sockets)
            raise
