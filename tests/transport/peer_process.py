"""One rank in a process of its own, told what to do on its standard input. Run as a script."""

from __future__ import annotations

import json
import sys

from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import PeerLimits, Peers


def main() -> None:
    setting = json.loads(sys.stdin.readline())
    limits = PeerLimits(**setting["limits"])
    peers = Peers(
        setting["rank"],
        setting["world_size"],
        address="127.0.0.1",
        secret=setting["secret"].encode(),
        limits=limits,
    )
    sys.stdout.write(peers.endpoint + "\n")
    sys.stdout.flush()
    peers.connect(json.loads(sys.stdin.readline()))
    # every message is echoed, until an empty one
    while payload := bytes(peers.start(Recv(0), 0).wait()):
        peers.start(Send(0, payload), 0)
    peers.close()


if __name__ == "__main__":
    main()
