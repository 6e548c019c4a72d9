"""What the system tells of threads, and which of them come first."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest
import zmq

from offbeat.transport.threads import (
    let_others_first,
    new_context,
    transport_threads,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows of threads")


def _receive_one(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    """A thread that has sent and received has its name, which it gives itself as it starts."""
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with context.socket(zmq.PUSH) as sender:
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(b"")
        assert socket.poll(timeout=60_000)
        socket.recv()


def test_threads_that_send_and_receive_are_those_of_offbeats_contexts() -> None:
    before = transport_threads()
    with new_context() as context, context.socket(zmq.PULL) as socket:
        _receive_one(context, socket)
        mine = transport_threads() - before
        assert len(mine) == 1
        with zmq.Context() as other, other.socket(zmq.PULL) as foreign:
            _receive_one(other, foreign)
            assert transport_threads() - before == mine
    while transport_threads() & mine:  # the kernel lists an ended thread for a moment longer
        os.sched_yield()


def test_a_thread_that_lets_others_first_changes_nothing_for_them(
    in_thread: Callable[..., threading.Thread],
) -> None:
    over = threading.Event()
    thread = in_thread(over.wait)
    assert thread.native_id is not None
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    let_others_first([thread.native_id, 2**30], 5)  # the other one has ended
    try:
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == min(19, mine + 5)
        assert os.getpriority(os.PRIO_PROCESS, 0) == mine
    finally:
        over.set()
