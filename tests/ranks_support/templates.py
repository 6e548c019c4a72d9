"""The test's side of `ranks_support.template`: starts fork servers when they are first needed, and
has ranks forked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from offbeat_lab.forking import ForkedProcess, ForkServer
from ranks_support.rank import Orders

NUM_TEMPLATES = 2
"""Each has a seed of its own for the hashes of strings, so that ranks do not go through a set in
the same order by chance.
"""


class Templates:
    """The fork servers of a test session, started when the first rank is."""

    def __init__(self) -> None:
        self._servers: list[ForkServer] = []
        self._lock = threading.Lock()

    def fork(
        self,
        orders: Orders,
        environment: Mapping[str, str],
        log: Path,
        *,
        namespace: Path | None = None,
    ) -> ForkedProcess:
        """Start a rank; it has `orders.result_fd` too from then on. With `namespace` it is in that
        network namespace.
        """
        with (
            self._lock,  # orders of several threads would mix
            log.open("wb") as output,
            Path(os.devnull).open("rb") as nothing,
        ):
            if not self._servers:
                self._servers = [start() for _ in range(NUM_TEMPLATES)]
            return self._servers[orders.rank % NUM_TEMPLATES].fork(
                [json.dumps(asdict(orders))],
                environment=environment,
                stdin=nothing.fileno(),
                output=output.fileno(),
                descriptors=[orders.result_fd],
                namespace=namespace,
            )

    def close(self) -> None:
        for server in self._servers:
            server.close()


def start() -> ForkServer:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(int.from_bytes(os.urandom(2))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return ForkServer("ranks_support.template", environment)
