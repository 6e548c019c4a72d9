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
    thread_time,
    transport_threads,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows of threads")


def test_threads_that_send_and_receive_are_those_of_offbeats_contexts() -> None:
    before = transport_threads()
    with new_context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("tcp://127.0.0.1:0")
        mine = transport_threads() - before
        assert len(mine) == 1
        with zmq.Context() as other, other.socket(zmq.PULL) as foreign:
            foreign.bind("tcp://127.0.0.1:0")
            assert transport_threads() - before == mine
    assert not transport_threads() & mine


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


def test_the_time_of_a_thread_grows_and_one_that_does_not_exist_has_none() -> None:
    mine = threading.get_native_id()
    earlier = thread_time(mine)
    if earlier is None:
        pytest.skip("this kernel does not count")
    sum(range(200_000))
    later = thread_time(mine)
    assert later is not None
    assert later.ran_s > earlier.ran_s
    assert later.waited_s >= earlier.waited_s
    assert thread_time(2**30) is None
