"""Meshes of real sockets on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from zmq.utils.garbage import gc

from offbeat.transport.peers import PeerLimits, Peers

SECRET = b"a secret of this test run only"
# short enough that a test need not wait, long enough for a busy machine to complete a handshake
BRISK = PeerLimits(grace_s=0.1, heartbeat_interval_s=0.05, heartbeat_timeout_s=5.0, linger_s=2.0)

OpenMesh = Callable[..., list[Peers]]


def _open_mesh(
    stack: ExitStack, world_size: int, limits: PeerLimits, *, watch_all: bool = True
) -> list[Peers]:
    mesh = []
    for rank in range(world_size):
        mesh.append(
            Peers(
                rank,
                world_size,
                address="127.0.0.1",
                secret=SECRET,
                limits=limits,
                watch_all=watch_all,
            )
        )
        stack.callback(mesh[-1].close)
    for peers in mesh:
        peers.connect([other.endpoint for other in mesh])
    return mesh


@pytest.fixture(scope="session", autouse=True)
def pyzmq_collector() -> None:
    """Start the thread that pyzmq keeps for the life of a process once it has sent
    without copying, unless an earlier test has.
    """
    if gc.thread is None:
        gc.start()


@pytest.fixture
def open_mesh() -> Iterator[OpenMesh]:
    """Opens connected ranks of one process, closed when the test ends."""
    with ExitStack() as stack:
        yield lambda world_size, limits=BRISK, watch_all=True: _open_mesh(
            stack, world_size, limits, watch_all=watch_all
        )


@pytest.fixture(scope="module")
def lasting_mesh() -> Iterator[list[Peers]]:
    """Three connected ranks shared by the examples of a property."""
    with ExitStack() as stack:
        yield _open_mesh(stack, 3, BRISK)


@pytest.fixture
def secret() -> bytes:
    return SECRET


@pytest.fixture
def brisk() -> PeerLimits:
    return BRISK
