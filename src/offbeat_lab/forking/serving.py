"""What a fork server does once it has imported what the processes need: fork one for each order."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pkgutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat_lab.network_namespace import enter

READY = b"ready\n"
"""The first line that a server sends."""

COMMAND_LINE_BYTES = 1024
"""Room for the command line that a process shows."""

_CHUNK_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16
_ARG_START = 45  # field 48 of /proc/self/stat, counted from the one after the program's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a forked process is told.

    Attributes:
        arguments: as they were given to `ForkServer.fork`.
        descriptors: the further descriptors that it got, in the order given there. They are closed
            when the process executes another program.
    """

    arguments: list[str]
    descriptors: list[int]


def import_where_possible(names: Sequence[str]) -> None:
    """Import modules, or objects such as "sklearn.datasets.load_digits", that are installed. What
    cannot be imported fails again in whoever needs it.
    """
    # There `python -m` has put the current directory, which need not be the processes'.
    here = sys.path.pop(0)
    for name in names:
        with suppress(Exception, SystemExit):
            pkgutil.resolve_name(name)
    sys.path.insert(0, here)


def serve(control: socket.socket) -> Order | None:
    """Fork a process for each order that comes through `control`. Does not begin where this process
    cannot be forked, because it has a second thread.

    Returns:
        In each forked process its order; in the server None, when nobody is left who could send
        one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.pread(1, os.fstat(1).st_size, 0)  # a file, which `ForkServer` has given
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        control.sendall(b"it has %d threads, and only one would be forked\n" % num_threads)
        return None
    # Else the garbage collector of each process would write to all objects, and the kernel would
    # copy every page that the process shares with the server.
    gc.collect()
    gc.freeze()
    control.sendall(READY)
    while True:
        line, descriptors = _receive(control)
        if not line:
            return None
        between = os.fork()
        if between == 0:
            message = json.loads(line)
            _fork_and_report(control, message, descriptors, printed)
            return Order(arguments=message["arguments"], descriptors=descriptors[2:])
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        control.sendall(b"\n")


def set_command_line(arguments: Sequence[str]) -> None:
    """Let `ps` show `arguments` as the command of this process, which a `ForkServer` has forked.
    What is longer than there is room for is cut off.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    text = b"\0".join(os.fsencode(argument) for argument in arguments)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """A line and the descriptors that came with it; both are empty at the end."""
    line, descriptors, _, _ = socket.recv_fds(control, _CHUNK_BYTES, _MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    while line and not line.endswith(b"\n"):
        line += control.recv(_CHUNK_BYTES)
    return line, descriptors


def _fork_and_report(
    control: socket.socket, message: dict[str, Any], descriptors: Sequence[int], printed: bytes
) -> None:
    """Fork the process that `message` orders, and tell the client its number once it is ready.
    Returns in that process only.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        problem = os.read(reading, _CHUNK_BYTES)  # until the child has closed its end
        outcome = {"pid": pid, "problem": problem.decode(errors="replace")}
        control.sendall(json.dumps(outcome).encode() + b"\n")
        os._exit(0)
    try:
        control.close()
        os.close(reading)
        _become(message, descriptors, printed)
    except BaseException as error:  # noqa: BLE001 - the client is told of it
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(writing)


def _become(message: dict[str, Any], descriptors: Sequence[int], printed: bytes) -> None:
    """Make this process what `message` orders."""
    os.setsid()
    stdin, output = descriptors[:2]
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(stdin)
    os.close(output)
    with suppress(OSError):  # a full disk takes no log
        while printed:
            printed = printed[os.write(1, printed) :]
    if sys.path[0] == os.getcwd():  # noqa: PTH109 - `python -m` looks for modules there first
        sys.path[0] = message["directory"]
    os.chdir(message["directory"])
    for name, value in message["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if message["namespace"] is not None:
        enter(Path(message["namespace"]))
