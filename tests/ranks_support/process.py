"""A function in a new process, which a job starts as a launcher would start a worker anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ranks_support.rank import LOOPBACK, STORE_PORT_VARIABLE
from ranks_support.references import dumps, loads


def start_process(
    function: Callable[..., None], *, environment: Mapping[str, str], **arguments: Any
) -> subprocess.Popen[bytes]:
    """Call the module-level `function(**arguments)` in a new process, whose environment is this one
    and `environment`.
    """
    call = dumps({"function": function, "arguments": arguments})
    return subprocess.Popen(
        [sys.executable, "-m", "ranks_support.process", call],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def launcher_environment(rank: int, world_size: int) -> dict[str, str]:
    """What a launcher would set for `rank`, were it started beside the calling rank of a test."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": os.environ[STORE_PORT_VARIABLE],
    }


def main() -> None:
    torch.set_num_threads(1)
    call = loads(sys.argv[1])
    call["function"](**call["arguments"])


if __name__ == "__main__":
    main()
