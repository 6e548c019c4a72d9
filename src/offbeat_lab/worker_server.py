"""The fork server of the lab's workers: `python -m offbeat_lab.worker_server SOCKET [NAMES]`,
with names to import.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

import numpy as np

from offbeat.codec import jit
from offbeat.run.progress import PIPE_VARIABLE
from offbeat_lab import worker  # noqa: F401 - what workers need
from offbeat_lab.forking import import_where_possible, serve

_IMPORTED_BY_A_FIRST_STEP = ("torch._dynamo",)


def main() -> None:
    """Import what workers need, and be one whenever the supervisor asks for one."""
    for name in _IMPORTED_BY_A_FIRST_STEP:
        importlib.import_module(name)
    jit.warm()
    import_where_possible(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        order = serve(control)
    if order is None:
        os._exit(0)
    # From here on this is a worker. It is to be as a fresh interpreter would be.
    np.random.seed()  # noqa: NPY002 - numpy seeds its global generator when it is imported
    name, *arguments = order.arguments
    program = importlib.import_module(name)
    sys.argv = [str(program.__file__), *arguments]
    os.environ[PIPE_VARIABLE] = str(order.descriptors[0])
    program.main_and_exit()


if __name__ == "__main__":
    main()
