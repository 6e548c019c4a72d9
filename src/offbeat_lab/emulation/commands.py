"""The programs `ip` and `tc`, many commands in one process, and what the namespaces they make are
good for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from offbeat.errors import ConfigError
from offbeat_lab.network_namespace import enter

T = TypeVar("T")

NAMESPACES = Path("/run/netns")
_PATIENCE_S = 60.0


class MissingMeansError(ConfigError):
    """This machine, or this user on it, lacks something without which the kernel cannot emulate a
    network.
    """


def path_of(program: str) -> str:
    """Where `program` is. Raises `MissingMeansError` when it is not installed."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        package = "util-linux" if program == "nsenter" else "iproute2"
        raise MissingMeansError(
            f"the program {program!r} is not installed; it comes with the package {package}"
        )
    return path


def run_batch(program: str, lines: Sequence[str], *, namespace: str | None = None) -> None:
    """Have `ip` or `tc` carry out `lines` in order, stopping at the first that fails.

    Raises:
        MissingMeansError: one failed, with its reason.
    """
    if not lines:
        return
    place = ["-n", namespace] if namespace else []
    if reason := _failure([path_of(program), *place, "-batch", "-"], lines):
        raise MissingMeansError(f"{program} failed: {reason}")


def run_shell(namespace: str, lines: Sequence[str]) -> None:
    """Have a shell carry out `lines` where /sys shows the devices of `namespace`. Raises `OSError`
    when one fails.
    """
    if reason := _failure([path_of("ip"), "netns", "exec", namespace, "sh", "-e"], lines):
        raise OSError(reason)


def _failure(command: Sequence[str], lines: Sequence[str]) -> str:
    """Why `command` did not carry out `lines`; empty where it did."""
    done = subprocess.run(
        command,
        input="\n".join(lines),
        text=True,
        capture_output=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    return (" ".join(done.stderr.split()) or f"status {done.returncode}") * bool(done.returncode)


def call_in(namespace: str, function: Callable[[], T]) -> T:
    """What `function` returns or raises, called in a thread of its own that lives in network
    namespace `namespace`.

    Sockets and threads that it makes stay there. Blocks until it is done.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            enter(NAMESPACES / namespace)
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=body, name=f"in {namespace}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
