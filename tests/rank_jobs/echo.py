"""A rank that sends back what it is sent, as a job."""

from __future__ import annotations

import json
import socket

from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers
from ranks_support.rank import LOOPBACK


def echo(rank: int, world_size: int, *, port: int, secret: str, limits: PeerLimits) -> None:
    """Rank 1 of two: every message of rank 0 is sent back, until an empty one.

    Args:
        rank, world_size: of this process.
        port: where rank 0 listens, to be told this rank's endpoint and to say those of both.
        secret: of the run.
        limits: of the mesh.
    """
    peers = Peers(rank, world_size, address=LOOPBACK, secret=secret.encode(), limits=limits)
    with socket.create_connection((LOOPBACK, port)) as meeting, meeting.makefile("rw") as lines:
        lines.write(peers.endpoint + "\n")
        lines.flush()
        peers.connect(json.loads(lines.readline()))
    while payload := bytes(peers.start(Recv(0), 0).wait()):
        peers.start(Send(0, payload), 0)
    peers.close()
