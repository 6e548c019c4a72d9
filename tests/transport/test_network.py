"""A store whose server is stopped while it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from torch.distributed import PrefixStore, TCPStore

from offbeat.errors import PeerError
from offbeat.transport.link import SILENCE_VARIABLE
from offbeat.transport.network import StoreLostError, answering_within, create_network
from offbeat.transport.rendezvous import Presence, Rendezvous

LOOPBACK = "127.0.0.1"
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


Served = tuple[subprocess.Popen[str], int]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A process that serves a store, and its port."""
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


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    server.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.mark.ranks
def test_a_store_that_is_stopped_ends_every_call_and_is_not_believed_later(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, "1.5")  # longer than a busy machine keeps the server
    server, port = served
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
    with stopped(server), pytest.raises(StoreLostError, match="serves it ended"):
        own.check(["key"])
    with pytest.raises(StoreLostError):  # not the answer to the question before
        own.add("count", 1)
    assert network.own_store().add("count", 1) == 3


@pytest.mark.ranks
def test_attach_does_not_wait_for_a_store_that_is_stopped_nor_believes_it_later(
    served: Served,
) -> None:
    server, port = served
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    meeting = Rendezvous(PrefixStore("attach", store), 0, [0, 1], lost=set())
    with (
        closing(Presence(LOOPBACK)) as presence,
        stopped(server),
        pytest.raises(PeerError, match="the run's store does not answer"),
        answering_within(store, 0.3),
    ):
        meeting.register({}, presence=presence.address)
    with pytest.raises(RuntimeError):
        store.add("count", 1)
