"""What `offbeat run --strategy allreduce` adds to a step of a script with DistributedDataParallel:
its supervisor, what it changes in PyTorch, the exchange in the place of DDP's, and the record.

The same script is started twice, by `offbeat run` and by plain Python, with two workers each, and
trains a few steps here and a few there, by turns. Who is not on waits for a line on a socket. Goal:
at most 1% slower.

    python benchmarks/run_overhead.py [--json]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np

from _ddp_script import MODELS
from _measure import Row, main, ratio
from _results import Figure

WORLD_SIZE = 2
NUM_PAIRS = 300
STEPS = 10
"""Of a turn."""
GOAL = 1.01
RUN, DDP = "offbeat run --strategy allreduce", "DistributedDataParallel"
SCRIPT = Path(__file__).with_name("_ddp_script.py")
START_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Those who run the script in one way.

    Attributes:
        lines: to and from each rank.
        supervisor: process id of the ranks' parent.
    """

    lines: Sequence[TextIO]
    supervisor: int

    def train(self, steps: int) -> float:
        """Seconds that `steps` steps take, of the rank that takes longest."""
        for lines in self.lines:
            print(steps, file=lines, flush=True)
        return max(float(lines.readline()) for lines in self.lines)


def commands(name: str, place: str, port: int, out: Path) -> Iterator[tuple[str, list[str], int]]:
    """Who runs the script, how, and as which rank."""
    here = [sys.executable, "-m", "offbeat_lab.cli", "run", "--strategy", "allreduce"]
    script = [str(SCRIPT), place]
    yield RUN, [*here, "--workers", str(WORLD_SIZE), "--out", str(out), *script, RUN, name], 0
    for rank in range(WORLD_SIZE):
        yield DDP, [sys.executable, *script, DDP, name], rank


@contextmanager
def ways(name: str) -> Iterator[Mapping[str, Measured]]:
    """Both, with their ranks started and waiting."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(place := str(directory / "referee"))
        listening.listen()
        listening.settimeout(START_LIMIT_S)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(SCRIPT.parent),
        }
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for who, command, rank in commands(name, place, port, directory / "run"):
            place_of_rank = {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)} | launched
            process = subprocess.Popen(
                command,
                env=common | (place_of_rank if who == DDP else {}),
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
        lines: dict[str, dict[int, TextIO]] = {RUN: {}, DDP: {}}
        parents: dict[str, int] = {}
        for _ in range(2 * WORLD_SIZE):
            connection = stack.enter_context(listening.accept()[0])
            connection.settimeout(START_LIMIT_S)
            each = stack.enter_context(connection.makefile("rw"))
            *who_words, rank_word, parent = each.readline().split()
            who = " ".join(who_words)
            lines[who][int(rank_word)], parents[who] = each, int(parent)
        yield {
            who: Measured(lines=list(ranks.values()), supervisor=parents[who])
            for who, ranks in lines.items()
        }


def cpu_s(process: int) -> float:
    """CPU time of `process`, without its children; 0 where the platform does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cases(name: str) -> Iterator[Row]:
    pairs = []
    with ways(name) as found:
        run, ddp = found[RUN], found[DDP]
        for warm in (run, ddp):
            warm.train(STEPS)
        before_s, began_s = cpu_s(run.supervisor), time.monotonic()
        for turn in range(NUM_PAIRS):
            # Whoever goes second finds warmer caches: take turns.
            if turn % 2:
                mine_s = run.train(STEPS)
                theirs_s = ddp.train(STEPS)
            else:
                theirs_s = ddp.train(STEPS)
                mine_s = run.train(STEPS)
            pairs.append((mine_s, theirs_s))
        # While the others train it does nothing.
        share = (cpu_s(run.supervisor) - before_s) / (time.monotonic() - began_s)
    label = f"{name}, {WORLD_SIZE} workers"
    for column, seconds in zip((RUN, DDP), np.array(pairs).T, strict=True):
        yield Figure(
            table="steps",
            case=label,
            column=f"{column}, ms",
            value=1e3 * float(np.median(seconds)) / STEPS,
            decimals=2,
        )
    yield Figure(
        table="steps",
        case=label,
        column="supervisor's CPU time, % of a core",
        value=100 * share,
        decimals=1,
    )
    yield ratio(f"offbeat run against DDP, step time, {label}", pairs, at_most=GOAL, bound=1.0)


if __name__ == "__main__":
    main({name: partial(cases, name) for name in MODELS})
