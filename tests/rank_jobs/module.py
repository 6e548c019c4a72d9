"""What `python -m` does, in a process that has imported torch and offbeat already."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO


def run_module(
    rank: int,
    world_size: int,
    *,
    command: Sequence[str],
    environment: dict[str, str],
    stdin: str = "",
    stdout: str = os.devnull,
) -> None:
    """Carry out the `command` of an interpreter; `stdout` is the path of a file."""
    python, as_module, module, *arguments = command
    assert (python, as_module) == (sys.executable, "-m")
    os.environ |= environment
    sys.argv, sys.stdin = [module, *arguments], StringIO(stdin)
    with open(stdout, "w") as said, redirect_stdout(said):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
