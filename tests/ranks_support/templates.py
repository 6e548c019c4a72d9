"""The test's side of `ranks_support.template`: starts fork servers when they are first needed, and
has ranks forked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import override

from offbeat_lab.forking import ForkedProcess, ForkServer
from ranks_support.rank import Orders

NUM_TEMPLATES = 2
"""Each has a seed of its own for the hashes of strings, so that ranks do not go through a set in
the same order by chance.
"""


class Templates:
    """The fork servers of a test session, each started when it is first needed."""

    def __init__(self) -> None:
        self._servers: dict[int, ForkServer] = {}
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
            return self._server(orders.rank % NUM_TEMPLATES).fork(
                [json.dumps(asdict(orders))],
                environment=environment,
                stdin=nothing.fileno(),
                output=output.fileno(),
                descriptors=[orders.result_fd],
                namespace=namespace,
            )

    def fork_worker_server(
        self, control: int, imports: Sequence[str], environment: Mapping[str, str], output: int
    ) -> ForkedProcess:
        """Start `offbeat_lab.worker_server`, which finds most of what it imports in a template."""
        with self._lock, Path(os.devnull).open("rb") as nothing:
            return self._server(0).fork(
                [WORKER_SERVER, *imports],
                environment=environment,
                stdin=nothing.fileno(),
                output=output,
                descriptors=[control],
            )

    def _server(self, number: int) -> ForkServer:
        if number not in self._servers:
            self._servers[number] = start()
        return self._servers[number]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


WORKER_SERVER = "offbeat_lab.worker_server"


def from_template(templates: Templates) -> type[ForkServer]:
    """Fork servers of the lab's workers, which are forked themselves."""

    class Forked(ForkServer):
        @override
        def begin(
            self,
            module: str,
            control: int,
            imports: Sequence[str],
            environment: Mapping[str, str],
            output: int,
        ) -> Any:
            # This is read when torch is imported, and must be as in a template.
            if module == WORKER_SERVER and environment.get("OMP_NUM_THREADS") == "1":
                return templates.fork_worker_server(control, imports, environment, output)
            return super().begin(module, control, imports, environment, output)

    return Forked


IN_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
"""Variables with which the memory of a process lies in large pages, where the kernel has them. A
fork copies the table of pages, and is several times faster then.
"""


def start() -> ForkServer:
    environment = {
        **os.environ,
        **IN_LARGE_PAGES,  # ranks have an environment of their own, without them
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(int.from_bytes(os.urandom(2))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return ForkServer("ranks_support.template", environment)
