from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def in_thread() -> Iterator[Callable[..., threading.Thread]]:
    """Starts functions in threads, which have to have ended with the test."""
    threads: list[threading.Thread] = []

    def start(work: Callable[..., object], *args: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
