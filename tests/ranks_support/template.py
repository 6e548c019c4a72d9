"""A process from which ranks are forked, with everything they need imported: `python -m
ranks_support.template SOCKET`.

Importing torch and offbeat takes seconds of a core, and tests start hundreds of ranks. What is
forked has one thread, as after an import, no group and no socket; it ends as `end` says.
A line on the socket starts one: its orders as JSON, with the descriptors of its outcome, its log
and its status. The status is two lines: its pid, and once it has ended its return code as
`subprocess` has it, here from a process in between whose child the rank is.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from offbeat.strategies import REGISTRY

PRELOADED = (
    "torch._dynamo",
    "offbeat.session.attach",
    *(entry.module for entry in REGISTRY.entries.values()),
    "offbeat.lab.native",
    "offbeat.megabatch.loader",
    "pytest",
)
"""What most ranks import sooner or later; optimizers import the first in their first step."""

CHUNK_BYTES = 1 << 16


def serve(orders_socket: socket.socket) -> dict[str, Any] | None:
    """Fork a rank for every message. Returns its orders in the rank; in the template None, when the
    tests are over.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test hears it, and ends what it has started
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    while True:
        line, descriptors, _, _ = socket.recv_fds(orders_socket, CHUNK_BYTES, 3)
        while line and not line.endswith(b"\n"):
            line += orders_socket.recv(CHUNK_BYTES)
        if not line:
            return None
        result, log, status = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders_socket.close()
            if (pid := os.fork()) == 0:
                os.close(status)
                become(log)
                return {**json.loads(line), "result_fd": result}
            os.close(result)
            os.write(status, b"%d\n" % pid)
            os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(log: int) -> None:
    """Print to `log`, and be interrupted as others are."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    from offbeat.codec import kernels
    from ranks_support import rank

    kernels.warm()
    gc.freeze()  # else every rank would look through all of it when it ends
    assert threading.active_count() == 1, "what has threads cannot be forked"
    with socket.socket(fileno=int(sys.argv[1])) as orders_socket:
        orders = serve(orders_socket)
    if orders is not None:
        environment = orders.pop("environment")
        os.chdir(orders.pop("directory"))
        os.environ.clear()
        os.environ.update(environment)
        rank.run(rank.Orders(**orders))
        end()


def end() -> NoReturn:
    """End this rank as an interpreter ends, save that modules are not taken apart.

    Taking them apart writes to every page that the rank still shares with its template, all of
    which the kernel copies first: 0.5 seconds of a core a rank, ten times what else it costs to
    start and to end one.
    """
    threading._shutdown()  # waits for threads, as at the end of a main module
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
