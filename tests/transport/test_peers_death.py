"""Ranks that are killed, stopped, or cut off: real processes, real sockets."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from offbeat.errors import PeerError, PeerTimeoutError
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers
from rank_jobs.echo import echo
from ranks_support.process import StartProcess, start_process

__all__ = ["start_process"]

OpenMesh = Callable[..., list[Peers]]

SECRET = "a secret between two processes"


def take(peers: Peers, peer: int, timeout_s: float | None = 60.0) -> bytes:
    return bytes(peers.start(Recv(peer, timeout_s), 0).wait())


class Remote:
    """Rank 0 here, and rank 1 in a process."""

    def __init__(self, start: StartProcess, limits: PeerLimits) -> None:
        self.peers = Peers(0, 2, address="127.0.0.1", secret=SECRET.encode(), limits=limits)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self.process = start(echo, 1, 2, port=port, secret=SECRET, limits=limits)
            meeting, _ = server.accept()
        with meeting, meeting.makefile("rw") as lines:
            endpoints = [self.peers.endpoint, lines.readline().strip()]
            lines.write(json.dumps(endpoints) + "\n")
            lines.flush()
            self.peers.connect(endpoints)
        assert self.echo(b"hello") == b"hello"

    def echo(self, payload: bytes) -> bytes:
        self.peers.start(Send(1, payload), 0)
        return take(self.peers, 1, timeout_s=60.0)

    def end(self) -> None:
        self.process.kill()
        self.peers.close()


@pytest.fixture
def start_remote(start_process: StartProcess) -> Iterator[Callable[[PeerLimits], Remote]]:
    with ExitStack() as stack:

        def start(limits: PeerLimits) -> Remote:
            remote = Remote(start_process, limits)
            stack.callback(remote.end)
            return remote

        yield start


@pytest.mark.ranks
def test_a_killed_rank_is_named_to_who_waits_for_it_and_stopping_alone_is_no_death(
    start_remote: Callable[[PeerLimits], Remote], brisk: PeerLimits
) -> None:
    remote = start_remote(brisk)
    remote.process.send_signal(signal.SIGSTOP)
    remote.peers.start(Send(1, b"while stopped"), 0)
    with pytest.raises(PeerTimeoutError):
        take(remote.peers, 1, timeout_s=3 * brisk.grace_s)
    assert remote.peers.dead() == {}
    remote.process.send_signal(signal.SIGCONT)
    assert take(remote.peers, 1) == b"while stopped"

    remote.process.kill()
    with pytest.raises(
        PeerError, match=r"rank 1 is dead: .* \(rank 0 waited for rank 1's message"
    ) as caught:
        take(remote.peers, 1, timeout_s=None)
    assert caught.value.rank == 1
    assert not isinstance(caught.value, PeerTimeoutError)
    assert list(remote.peers.dead()) == [1]


@pytest.mark.ranks
def test_a_rank_that_is_silent_for_longer_than_the_heartbeats_allow_is_dead(
    start_remote: Callable[[PeerLimits], Remote], brisk: PeerLimits
) -> None:
    limits = replace(brisk, heartbeat_timeout_s=1.0)  # longer than a busy machine keeps a thread
    remote = start_remote(limits)
    # a thread that does nothing still answers heartbeats
    with pytest.raises(PeerTimeoutError):
        take(remote.peers, 1, timeout_s=1.5 * limits.heartbeat_timeout_s)
    remote.process.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerError, match="rank 1 is dead"):
        take(remote.peers, 1, timeout_s=None)


class Cable:
    """A TCP relay to an endpoint that can be cut, mended, and told to lose what passes."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._whole = True
        self.loses = False
        self.has_lost = threading.Event()
        self.connected = threading.Event()
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._begin(self._accept)

    def cut(self) -> None:
        self._whole = False
        self.connected.clear()
        for end in self._sockets:
            # either end may have noticed already
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self.cut()
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [*self._sockets, self._listening]:
            end.close()

    def _begin(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if not self._whole:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                self.connected.set()  # before anything passes, so that `cut` clears it for good
                self._begin(self._relay, client, server, True)
                self._begin(self._relay, server, client, False)

    def _relay(self, source: socket.socket, target: socket.socket, forward: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if forward and self.loses:
                    self.has_lost.set()
                else:
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cabled(
    secret: bytes, brisk: PeerLimits
) -> Iterator[Callable[[PeerLimits], tuple[Peers, Peers, Cable]]]:
    """Opens two ranks; the messages from rank 0 to rank 1 run over a cable."""
    with ExitStack() as stack:

        def open_pair(limits: PeerLimits) -> tuple[Peers, Peers, Cable]:
            pair = [
                Peers(rank, 2, address="127.0.0.1", secret=secret, limits=limits)
                for rank in range(2)
            ]
            cable = Cable(pair[1].endpoint)
            stack.callback(cable.close)
            for peers in pair:
                stack.callback(peers.close)
            pair[0].connect([pair[0].endpoint, cable.endpoint])
            pair[1].connect([peers.endpoint for peers in pair])
            pair[0].start(Send(1, b"first"), 0)
            assert take(pair[1], 0) == b"first"
            pair[0].await_connections(60.0)  # so that it knows of its own before that breaks
            return pair[0], pair[1], cable

        yield open_pair


Cabled = Callable[[PeerLimits], tuple[Peers, Peers, Cable]]


def test_a_connection_that_comes_back_within_the_grace_period_is_forgiven(
    cabled: Cabled, brisk: PeerLimits
) -> None:
    first, second, cable = cabled(replace(brisk, grace_s=60.0))
    cable.cut()
    cable.mend()
    assert cable.connected.wait(60.0)
    first.start(Send(1, b"again"), 0)
    assert take(second, 0) == b"again"
    assert first.dead() == second.dead() == {}


def test_a_connection_that_stays_away_is_a_death(cabled: Cabled, brisk: PeerLimits) -> None:
    first, _, cable = cabled(brisk)
    cable.cut()
    with pytest.raises(PeerError, match="rank 1 is dead"):
        take(first, 1, timeout_s=None)


def test_messages_lost_on_a_broken_connection_are_an_error_and_not_a_hang(
    cabled: Cabled, brisk: PeerLimits
) -> None:
    # No heartbeat is lost in the place of the message.
    first, second, cable = cabled(replace(brisk, grace_s=60.0, heartbeat_interval_s=60.0))
    cable.loses = True
    first.start(Send(1, b"lost"), 0)
    assert cable.has_lost.wait(60.0)
    cable.cut()
    cable.loses = False
    cable.mend()
    while not second.wait_for_death(0.02):
        assert first.dead() == {}
    with pytest.raises(PeerError, match="rank 0 lost messages"):
        take(second, 0)
