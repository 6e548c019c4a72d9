"""A fork server that imports nothing of weight by itself: `python -m lab_support.fork_server SOCKET
[NAMES]`. Its processes do what the first of their arguments says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from offbeat_lab.forking import Order, import_where_possible, serve

FAILS = "TEST_SERVER_FAILS"
HAS_A_THREAD = "TEST_SERVER_HAS_A_THREAD"
PRINTS = "TEST_SERVER_PRINTS"
"""Variables at which the server itself behaves otherwise. The first names a directory in which it
leaves a file.
"""

SERVER = os.getpid()


def describe(order: Order) -> int:
    """Write down what this process is like."""
    typed = sys.stdin.read()
    description = {
        "pid": os.getpid(),
        "server": SERVER,
        "parent": os.getppid(),
        "session": os.getsid(0),
        "directory": str(Path.cwd()),
        "modules": sys.path[0],
        "environment": dict(os.environ),
        "descriptors": sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()),
        "inheritable": [os.get_inheritable(descriptor) for descriptor in order.descriptors],
        "network": str(Path("/proc/self/ns/net").readlink()),
        "stdin": typed,
        "hears_interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "imported": sorted({"colorsys", "this"} & set(sys.modules)),
    }
    print("printed")
    print("complained", file=sys.stderr)
    with os.fdopen(order.descriptors[0], "w") as answers:
        json.dump(description, answers)
    return 5


def wait(order: Order) -> int:
    """Wait until standard input has ended."""
    with os.fdopen(order.descriptors[0], "w") as answers:
        answers.write(f"{SERVER} {os.getpid()}\n")
    sys.stdin.read()
    return 0


def main() -> None:
    if FAILS in os.environ:
        Path(os.environ[FAILS], f"started-{SERVER}").touch()
        raise ImportError("no such thing")
    if HAS_A_THREAD in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if PRINTS in os.environ:
        print("deprecated")
    import_where_possible(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        order = serve(control)
    if order is not None:
        sys.exit({"describe": describe, "wait": wait}[order.arguments[0]](order))


if __name__ == "__main__":
    main()
