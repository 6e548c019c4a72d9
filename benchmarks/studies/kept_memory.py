"""What workers gain where glibc keeps freed memory for the next step, and what that takes.

Two workers train a network of 25 million parameters with SGD, its largest layer of 61 MB, as
`offbeat train` starts them: by turns as they are, and with a variable that leaves malloc as glibc
has it. Told are the seconds of a step, its median after ten steps, and the largest resident memory
of a worker.

    python benchmarks/studies/kept_memory.py [--json] [--results DIR]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

import _benchmarks  # noqa: F401
from _measure import Ratio, main, ratio
from offbeat_lab.breakdown import read_steps
from offbeat_lab.records import Record

STRATEGIES: Final = ("ddp", "allreduce", "gtopk", "localsgd:period=4")
LEFT_ALONE: Final = {"MALLOC_PERTURB_": "0"}
"""glibc's default, said."""
STEPS, SETTLED, REPEATS = 40, 10, 5


def trained(strategy: str, directory: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of a step, and the bytes of the largest worker."""
    command = (
        f"-m offbeat_lab.cli train --task digits --set size=large --set batch_size=8"
        f" --strategy {strategy} --workers 2 --steps {STEPS} --json --out {directory}"
    )
    arguments = [sys.executable, *command.split()]
    environment = os.environ | environment
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
    _, process.returncode, usage = os.wait4(process.pid, 0)
    if process.returncode:
        raise SystemExit(f"{strategy} has not trained")
    step_s = read_steps(Record(directory)).step_s()
    return float(np.median(step_s[SETTLED:])), float(usage.ru_maxrss) * 1024


def cases(strategy: str) -> Iterator[Ratio]:
    """Pairs by turns, each in the opposite order of the last."""
    pairs = []
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(REPEATS):
            turns = [("kept", {}), ("left", LEFT_ALONE)]
            measured = {
                name: trained(strategy, Path(directory) / f"{name}-{repeat}", environment)
                for name, environment in (turns if repeat % 2 else turns[::-1])
            }
            pairs.append((measured["kept"], measured["left"]))
    steps = [(kept[0], left[0]) for kept, left in pairs]
    yield ratio(f"a step of {strategy}, kept over not", steps, bound=0.0, at_most=1.0)
    memory = [(kept[1], left[1]) for kept, left in pairs]
    yield ratio(f"a worker's memory, {strategy}, kept over not", memory, bound=1.0, at_most=1.25)


if __name__ == "__main__":
    main({strategy: partial(cases, strategy) for strategy in STRATEGIES})
