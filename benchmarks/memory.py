"""What strategies keep and need beside a model, in bytes a parameter more than DDP.

Two ranks train a stack of square linear layers by SGD with momentum on random samples. Each row has
a process group of its own. A small model trains first, so that what the interpreter loads does not
count. Told is how far the resident memory of rank 0 rises, at most, while the large model is made
and trained, and until the session is closed. glibc is told to give back at once every block of a MB
that is freed, so that this is what is allocated, and not what the heap has kept of earlier steps.

The ranks end with models that differ, so that closing has a mean to make. Besides, the step's time
with 12.6 million parameters and with 100.7 million: a step should cost in proportion.

    python benchmarks/memory.py [--json] [--layers N,...] [--strategies NAME,...] [--results DIR]
        [--dtype bfloat16]

A layer has 4.2 million parameters: 24 layers are 100.7 million, 72 are 302 million, 238 a billion.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

import offbeat
from _measure import Row, add_output_options, present
from _ranks import run_ranks
from _results import Figure

WORLD_SIZE: Final = 2
WIDTH: Final = 2048
SLACK: Final = 1.0
"""Bytes a parameter beyond what a strategy has to keep."""
SMALL, LARGE = 3, 24
GROWTH: Final = 8.5
"""How many times a step may take with `LARGE` layers what it takes with `SMALL` ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStrategy:
    """A strategy, the bytes a parameter that it cannot do without, and how many steps show its
    peak. The last one is followed by no average of weights.
    """

    make: Callable[[], Any]
    needed: float
    num_steps: int = 5


STRATEGIES: Final[Mapping[str, MeasuredStrategy]] = {
    "AllReduce": MeasuredStrategy(make=offbeat.AllReduce, needed=0),
    "TopK": MeasuredStrategy(make=partial(offbeat.TopK, density=0.001), needed=4),
    "GTopK": MeasuredStrategy(make=partial(offbeat.GTopK, density=0.001), needed=4),
    "LocalSGD": MeasuredStrategy(make=partial(offbeat.LocalSGD, period=2), needed=0),
    "LocalSGD in 16 fragments": MeasuredStrategy(
        make=partial(offbeat.LocalSGD, period=32, exchange="16x1"), needed=4, num_steps=9
    ),
    "DiLoCo": MeasuredStrategy(make=partial(offbeat.LocalSGD, period=2, outer="diloco"), needed=8),
    "WAGMA": MeasuredStrategy(make=partial(offbeat.WAGMA, period=4), needed=8),
    "SPDKFAC": MeasuredStrategy(make=offbeat.SPDKFAC, needed=16, num_steps=2),
    "AdaptiveSGD": MeasuredStrategy(
        make=partial(offbeat.AdaptiveSGD, mega_batch=4), needed=16, num_steps=9
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What a rank needed, in bytes a parameter, and the seconds of a step."""

    training: float
    closed: float
    step_s: float


def measure(rank: int, world_size: int, name: str, num_layers: int, dtype: str) -> Peak:
    torch.set_default_dtype(getattr(torch, dtype))
    num_steps = STRATEGIES[name].num_steps if name in STRATEGIES else 5
    train(name, 1, 64, num_steps)
    gc.collect()
    before = resident("VmRSS")
    # From here on the highest value is that of what follows.
    Path("/proc/self/clear_refs").write_text("5")
    training, step_s = train(name, num_layers, WIDTH, num_steps)
    num_parameters = num_layers * WIDTH * WIDTH
    return Peak(
        training=(training - before) / num_parameters,
        closed=(resident("VmHWM") - before) / num_parameters,
        step_s=step_s,
    )


def train(name: str, num_layers: int, width: int, num_steps: int) -> tuple[int, float]:
    """The highest resident memory before the end, in bytes, and the median seconds of a step."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(num_layers))
        )
    model.to_empty(device="cpu")
    # Orthogonal, so that gradients stay finite however many layers there are.
    weight, _ = torch.linalg.qr(torch.randn(width, width, dtype=torch.float32))
    for parameter in model.parameters():
        parameter.detach().copy_(weight)
    del weight
    trained: torch.nn.Module = model
    # Without momentum in half precision, so that a billion parameters fit twice on one machine.
    momentum = 0.9 if torch.get_default_dtype() == torch.float32 else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=momentum)
    session = None
    samples = torch.randn(2 * WORLD_SIZE * num_steps, width)
    batches: Any = samples.split(2)
    if name == "DDP":
        trained = DistributedDataParallel(model)
    else:
        session = offbeat.attach(model, optimizer, STRATEGIES[name].make())
        if session.strategy.shares_samples:
            batches = session.loader(samples, batch_size=2)
    seconds = []
    for batch in batches:
        begin_s = time.perf_counter()
        trained(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin_s)
        if len(seconds) == num_steps and not (session and session.strategy.shares_samples):
            break
    peak = resident("VmHWM")
    if session is not None:
        session.close()
    return peak, sorted(seconds)[len(seconds) // 2]


def resident(kind: str) -> int:
    """Resident memory of this process in bytes, by its name in Linux's /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return 1024 * int(line.split()[1])
    raise OSError(f"the system does not tell {kind}")


@cache
def peak(name: str, num_layers: int, dtype: str = "float32") -> Peak:
    found: Peak = run_ranks(measure, WORLD_SIZE, name, num_layers, dtype)
    return found


def memory(name: str, num_layers: int, dtype: str) -> Iterator[Row]:
    table = f"{num_layers * WIDTH * WIDTH / 1e6:.0f} million parameters"
    if dtype != "float32":
        table += f", {dtype}"
    ddp = peak("DDP", num_layers, dtype)
    if name == "DDP":
        case = "DDP, in all"
        yield Figure(table=table, case=case, column="training", value=ddp.training, decimals=1)
        return
    mine, needed = peak(name, num_layers, dtype), STRATEGIES[name].needed
    over = mine.closed - ddp.closed
    for column, value in (("needed", needed), ("training", mine.training - ddp.training)):
        yield Figure(table=table, case=name, column=column, value=value, decimals=1)
    yield Figure(
        table=table,
        case=name,
        column="until closed",
        value=over,
        decimals=1,
        goal=f"at most {needed + SLACK:g}",
        holds=over <= needed + SLACK,
    )


def growth(name: str) -> Iterator[Row]:
    small, large = peak(name, SMALL).step_s, peak(name, LARGE).step_s
    for layers, seconds in ((SMALL, small), (LARGE, large)):
        column = f"{layers * WIDTH * WIDTH / 1e6:.1f} million, s"
        yield Figure(table="step", case=name, column=column, value=seconds, decimals=3)
    times, is_judged = large / small, name != "DDP"
    yield Figure(
        table="step",
        case=name,
        column="times",
        value=times,
        decimals=1,
        goal=f"at most {GROWTH:g}" if is_judged else "",
        holds=times <= GROWTH if is_judged else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--layers", default=str(LARGE), help="default: %(default)s")
    parser.add_argument("--strategies", default=",".join(["DDP", *STRATEGIES]), help="default: all")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    asked = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # of the processes that are started
    names = asked.strategies.split(",")
    of_dtype = "" if asked.dtype == "float32" else f", {asked.dtype}"
    cells = {
        f"{name}, {layers} layers{of_dtype}": partial(memory, name, int(layers), asked.dtype)
        for layers in asked.layers.split(",")
        if layers
        for name in names
    }
    timed = [name for name in ("DDP", "AllReduce", "GTopK") if name in names and not of_dtype]
    present(cells | {f"{name}, step": partial(growth, name) for name in timed}, asked)


if __name__ == "__main__":
    main()
