"""One member in a process of its own, until its standard input ends. Run as a script, with its
orders as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore

from offbeat.membership.generations import Generations
from offbeat.transport.link import PeerLimits
from offbeat.transport.network import Network
from offbeat.transport.peers import Peers

if TYPE_CHECKING:
    from offbeat.membership.agreement import Generation
    from offbeat.transport.driver import Driver


class Quiet:
    """A host that does nothing but hold its newest mesh."""

    driver: Peers | None = None

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        assert isinstance(driver, Peers)
        self.end()
        self.driver = driver

    def unreachable(self) -> frozenset[int]:
        assert self.driver is not None
        return frozenset([*self.driver.dead(), *self.driver.left()])

    def expelled(self) -> None:
        pass

    def lost_store(self, reason: str) -> None:
        pass

    def run_over(self) -> None:
        pass

    def retired(self, reason: str) -> None:
        pass

    def end(self) -> None:
        if self.driver is not None:
            self.driver.close()


def main() -> None:
    orders = json.loads(sys.argv[1])
    store = PrefixStore(
        "run", TCPStore("127.0.0.1", orders["port"], is_master=False, wait_for_workers=False)
    )
    network = Network(
        store=store,
        rank=orders["rank"],
        world_size=orders["world_size"],
        address="127.0.0.1",
        secret=orders["secret"].encode(),
    )
    host = Quiet()
    generations = Generations(
        network, host, **orders["options"], limits=PeerLimits(**orders["limits"])
    )
    if orders["joins"]:
        generations.join("{}", timeout_s=60.0)
    else:
        generations.start("{}")
    sys.stdin.read()
    generations.close()
    host.end()


if __name__ == "__main__":
    main()
