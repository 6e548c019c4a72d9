"""Processes that are forked from one which has imported what they need: the fork server.

Importing torch and offbeat takes seconds of processor time, and so does importing what the first
step of an optimizer needs. A fork server is a fresh interpreter that imports all of it once, has
one thread, and never touches CUDA. A process that it forks starts in about a hundredth of a second.

`client` is the side of the process that has others forked, `serving` the side of the server.
"""

from __future__ import annotations

from offbeat_lab.forking.client import ForkedProcess, ForkServer, ForkServerError
from offbeat_lab.forking.serving import Order, import_where_possible, serve, set_command_line

__all__ = [
    "ForkServer",
    "ForkServerError",
    "ForkedProcess",
    "Order",
    "import_where_possible",
    "serve",
    "set_command_line",
]
