"""A store whose server is stopped while it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import PrefixStore, TCPStore

from offbeat.transport.network import create_network
from offbeat.transport.silence import SILENCE_VARIABLE

LOOPBACK = "127.0.0.1"
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], int]]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert server.stdout is not None
        yield server, int(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


@pytest.mark.ranks
def test_a_store_that_is_stopped_ends_every_call_and_is_not_believed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1.5")  # longer than a busy machine keeps the server
    with served() as (server, port):
        shared = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        network = create_network(
            PrefixStore("any", shared),
            token="a token",
            rank=0,
            world_size=1,
            address=LOOPBACK,
            secret=b"a secret of this test run only",
        )
        own = network.own_store()
        own.set("key", "value")
        assert own.get("key") == b"value"
        assert own.check(["key"])
        assert own.compare_set("key", "value", "other") == b"other"
        assert own.add("count", 2) == 2
        assert own.multi_get(["key", "count"]) == [b"other", b"2"]
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        with pytest.raises(RuntimeError):
            own.check(["key"])
        server.send_signal(signal.SIGCONT)
        with pytest.raises(RuntimeError):  # not the answer to the question before
            own.add("count", 1)
        assert network.own_store().add("count", 1) == 3
