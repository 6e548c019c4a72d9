"""Strategies behind emulated links: a network of 25 million parameters, batches of 8, four workers.

Each strategy trains for a few steps by turns with the others (`offbeat compare`); the goals are
about seconds a step. The bound is what the link alone would allow: bytes over bandwidth of both,
nothing computed. Needs root for network namespaces; without, links are imitated in user space, and
the case says so. First, gloo's dense all-reduce alone must fill the line: a baseline that does not
would be a dishonest one. So must eight workers that send to one, three and seven peers at once.

Last, gTop-k as it comes, which chooses its density by links and steps, trains the task `text`:

    a step of GTopK(), after the warm-up of its density, over the ideal: at most 1.15

With `--paused-only`, and only so, computing is replaced by a pause. Four and eight workers, in
network namespaces, exchange gradients of 25 million parameters that are made up beforehand, so what
is left of a step is the exchange, the selection and the optimizer. There Top-k S-SGD stands beside
gTop-k S-SGD, and gTop-k at the densities of its warm-up.

    python benchmarks/links.py [--json] [--keep DIRECTORY] [--line-only | --paused-only]
    [--rates MBIT,...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from _measure import Cells, Ratio, Row, add_output_options, present, ratio, script_command
from _ranks import run_ranks
from _results import Figure
from offbeat.run.coordination import serve_store, store_environment
from offbeat.run.progress import WorkerProgress
from offbeat_lab.analysis import between
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.compare import (
    ComparePlan,
    CompareRequest,
    ComparisonListener,
    plan_comparison,
    run_comparison,
)
from offbeat_lab.comparison import Comparison
from offbeat_lab.emulation import Emulation, emulate
from offbeat_lab.statistics import Estimate

WORKERS = 4
STRATEGIES = (
    "ddp",
    "gtopk:density=0.001",
    "ddp-powersgd:rank=1:start_step=2",
    "ddp-powersgd:rank=4:start_step=2",
    "ddp-fp16",
)
ROUNDS = (STRATEGIES[:3], (STRATEGIES[1], *STRATEGIES[3:]))
"""No more than three at a time: ranks that wait for their turn keep their memory, a gigabyte each,
and with five strategies the steps of all took 0.1 s longer here.
"""
GOALS = {1e9: 5.0, 100e6: 40.0}
"""By rate in bit/s: how many times the steps per second of DDP gTop-k has to make."""
STEPS = {1e9: 32, 100e6: 10}
LONGEST_STEP_S = {1e9: 0.29}
"""By rate in bit/s: what a step of gTop-k may take."""
AS_IT_COMES = ("window=32", "batch_size=8", "optimizer=adamw", "lr=0.0015")
AS_IT_COMES_STEPS, OVER_THE_IDEAL = 600, 1.15
"""The first 200 steps have more entries; the median of a run's blocks is of the later ones."""
ALL_REDUCE_BYTES = 100_000_000
LEAST_LINE_RATE = 0.9
MANY, FAN_OUTS, FAN_OUT_S = 8, (1, 3, 7), 0.1
"""Workers, to how many peers each sends, and how long that takes on the line."""
LEAST_WITH_FAN_OUT = 0.7
"""Eight processes share the machine's cores, and the kernel carries their packets on the same ones.
"""
PAUSED_WORKERS, PAUSE_S, PAUSED_STEPS = (4, 8), 0.1, {1e9: 20, 100e6: 8}
PAUSED_BASE = "gtopk:density=0.001"
PAUSED = {
    "methods": ("allreduce", "topk:density=0.001", PAUSED_BASE),
    "collectives": (
        PAUSED_BASE,
        *(f"{PAUSED_BASE}:collective={name}" for name in ("tree", "reduce_scatter")),
    ),
    "warm-up": (PAUSED_BASE, "gtopk:density=0.01", "gtopk:density=0.1"),
}
"""By round, what takes turns, no more than three at a time, which take 1.8 GB in each rank. 0.1 is
what the warm-up has, and 0.01 what comes between it and 0.001.
"""
PAUSED_PARAMETERS, PAUSED_LAYERS, PAUSED_WARM_UP = 25_000_000, 8, 2
PAUSED_TABLE = f"seconds a step, computing replaced by a pause of {PAUSE_S:g} s"
PAUSED_RATIOS = f"the same over the step of {PAUSED_BASE}"

_PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
num_elements, fan_out = int(sys.argv[1]) // 4, int(sys.argv[2])
tensor = torch.zeros(num_elements)
parts = [num_elements // fan_out if 1 <= (peer - rank) % world_size <= fan_out else 0 for peer in range(world_size)]
expected = [num_elements // fan_out if 1 <= (rank - peer) % world_size <= fan_out else 0 for peer in range(world_size)]
received = torch.zeros(sum(expected))
for turn in range(int(sys.argv[3]) + 1):
    dist.barrier()
    begun_s = time.perf_counter()
    if fan_out == world_size:
        dist.all_reduce(tensor)
    else:
        dist.all_to_all_single(received, tensor[: sum(parts)], expected, parts)
    if turn and rank == 0:
        print(time.perf_counter() - begun_s, flush=True)
dist.barrier()
"""


class Quiet:
    """Watches and says nothing but failures."""

    def begin(self, labels: object, num_workers: int, num_seeds: int, steps: int) -> None: ...
    def seed(self, place: int) -> None: ...
    def turn(self, label: str) -> None: ...
    def progress(self, label: str, progress: WorkerProgress) -> None: ...
    def membership_changed(self, label: str, change: object) -> None: ...
    def failed(self, label: str, reason: str) -> None:
        print(f"{label} failed: {reason}", file=sys.stderr)


def watched(
    plan: ComparePlan, listener: ComparisonListener | None = None
) -> tuple[Path, Comparison]:
    """The directory of the comparison, and what was found.

    Raises:
        SystemExit: it was asked to stop, and figures of what has been done are not those asked for.
    """
    command = script_command()
    directory, comparison = run_comparison(plan, listener or Quiet(), command=command)
    if comparison.status == "stopped":
        raise SystemExit(f"stopped; what has been done is in {directory}")
    return directory, comparison


def exchange_s(
    emulation: Emulation, num_workers: int, num_bytes: int, fan_out: int, turns: int
) -> list[float]:
    """Seconds in which each worker sends `num_bytes` to `fan_out` peers; to all, itself among
    them, is a dense all-reduce.
    """
    store = emulation.call_inside(lambda: serve_store(emulation.store_address))
    with ExitStack() as stack:
        workers = []
        for rank in range(num_workers):
            placement = emulation.placement(rank)
            environment = {
                "OMP_NUM_THREADS": "1",
                **store_environment(store, rank, num_workers),
                **placement.environment,
            }
            arguments = [str(num_bytes), str(fan_out), str(turns)]
            process = subprocess.Popen(
                [*placement.prefix, sys.executable, "-c", _PROGRAM, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            emulation.admit(rank, process.pid)
            workers.append(process)
        outputs = [process.communicate(timeout=300)[0] for process in workers]
    return [float(line) for line in outputs[0].split()]


def line_rate(rate_bit_per_s: float) -> Ratio:
    """How much of the line gloo's all-reduce fills."""
    with emulate(
        Cluster(workers=WORKERS, link=LinkSpec(rate_bit_per_s=rate_bit_per_s))
    ) as emulation:
        seconds = exchange_s(emulation, WORKERS, ALL_REDUCE_BYTES, WORKERS, turns=3)
        kind = emulation.report.kind
    name = f"gloo all-reduce of 100 MB, share of a line of {rate_bit_per_s / 1e6:g} Mbit/s ({kind})"
    return _share_of_line(
        name, 2 * (WORKERS - 1) / WORKERS * ALL_REDUCE_BYTES * 8 / rate_bit_per_s, seconds
    )


def fan_outs(rate_bit_per_s: float) -> Iterator[Ratio]:
    """How much of the line a worker fills that sends to several at once, as all its peers do."""
    num_bytes = rate_bit_per_s / 8 * FAN_OUT_S
    with emulate(Cluster(workers=MANY, link=LinkSpec(rate_bit_per_s=rate_bit_per_s))) as emulation:
        for fan_out in FAN_OUTS:
            seconds = exchange_s(emulation, MANY, int(num_bytes), fan_out, turns=12)
            name = (
                f"{MANY} workers send to {fan_out} peers each, share of a line of"
                f" {rate_bit_per_s / 1e6:g} Mbit/s"
            )
            yield _share_of_line(
                f"{name} ({emulation.report.kind})", FAN_OUT_S, seconds, at_least=LEAST_WITH_FAN_OUT
            )


def _share_of_line(
    case: str, ideal_s: float, seconds: Sequence[float], *, at_least: float = LEAST_LINE_RATE
) -> Ratio:
    parts = [ideal_s / s for s in seconds]
    return Ratio(
        case=case,
        value=float(np.median(parts)),
        unit="x",
        goal=f"at least {at_least:g}",
        holds=bool(np.median(parts) >= at_least),
        bound=1.0,
        interval=(min(parts), max(parts)),
    )


def compared(
    rate_bit_per_s: float,
    steps: int,
    out: Path,
    *,
    task: str = "digits",
    settings: Sequence[str] = ("size=large", "batch_size=8"),
    labels: Sequence[str],
) -> Comparison:
    """A comparison behind links of one rate.

    Args:
        rate_bit_per_s: of each worker's link.
        steps: of each strategy.
        out: directory of the comparison.
        task, settings: what is trained.
        labels: the strategies.
    """
    cluster = Cluster(workers=WORKERS, link=LinkSpec(rate_bit_per_s=rate_bit_per_s))
    request = CompareRequest(
        task=task,
        strategies=labels,
        settings=settings,
        cluster=cluster,
        seeds=(0,),
        steps=steps,
        eval_every=steps,
        turn_s=4.0,
    )
    return watched(plan_comparison(request, out=out))[1]


def faster(comparison: Comparison, slow: str, at_least: float, case: str) -> Ratio:
    """How many times shorter gTop-k's steps are than those of `slow`."""
    difference = between(comparison, "step_s", slow, "gtopk")
    if difference is None or difference.low is None or difference.high is None:
        raise SystemExit(f"no result for {slow}")
    by_label = {
        strategy.label: strategy.measures["bytes_per_step"].median or 1.0
        for strategy in comparison.strategies
    }
    straddles = difference.low < at_least < difference.high
    return Ratio(
        case=f"{case}: {slow} over gtopk, seconds a step ({comparison.emulation.kind})",
        value=difference.ratio,
        unit="x",
        goal=f"at least {at_least:g}",
        holds="undecided" if straddles else difference.low >= at_least,
        bound=by_label[slow] / by_label["gtopk"],
        interval=(difference.low, difference.high),
    )


def strategies(rate_bit_per_s: float, directory: Path) -> Iterator[Row]:
    """Steps of gTop-k against those of all its peers behind links of one rate."""
    name = f"{rate_bit_per_s / 1e6:g} Mbit/s"
    for number, labels in enumerate(ROUNDS):
        out = directory / f"{rate_bit_per_s / 1e6:g}mbit-{number}"
        comparison = compared(rate_bit_per_s, STEPS[rate_bit_per_s], out, labels=labels)
        print(f"{name}: {comparison.verdict}", file=sys.stderr)
        for strategy in comparison.strategies:
            label, step_s = strategy.label, strategy.measures["step_s"]
            # A label has no options where no other strategy of the comparison has its name.
            spec = next(spec for spec in labels if spec.partition(":")[0] == label)
            case = label if label == "gtopk" else spec.replace(":", " ")
            if label != "gtopk":
                at_least = GOALS[rate_bit_per_s] if label == "ddp" else 1.0
                found = faster(comparison, label, at_least, name)
                yield replace(found, case=found.case.replace(label, case))
                yield Figure(
                    table="how many times faster gTop-k's steps are",
                    case=case,
                    column=name,
                    value=found.value,
                    interval=found.interval,
                )
            elif number == 0 and rate_bit_per_s in LONGEST_STEP_S:
                yield at_most(
                    f"{name}: a step of gtopk ({comparison.emulation.kind})",
                    step_s,
                    limit=LONGEST_STEP_S[rate_bit_per_s],
                    unit="s",
                    bound=float("inf"),
                )
            if label != "gtopk" or number == 0:
                yield Figure(table="seconds a step", case=case, column=name, value=step_s.median)


def as_it_comes(rate_bit_per_s: float, directory: Path) -> Iterator[Row]:
    """A step of gTop-k, whose density is chosen by what it costs, over the ideal."""
    name = f"{rate_bit_per_s / 1e6:g} Mbit/s"
    comparison = compared(
        rate_bit_per_s,
        AS_IT_COMES_STEPS,
        directory / f"as-it-comes-{rate_bit_per_s / 1e6:g}mbit",
        task="text",
        settings=AS_IT_COMES,
        labels=("allreduce", "gtopk"),
    )
    (gtopk,) = (one for one in comparison.strategies if one.label == "gtopk")
    share = gtopk.measures["efficiency"]
    yield at_most(
        f"{name}: a step of gtopk as it comes over the ideal, text ({comparison.emulation.kind})",
        Estimate(
            values=[value and 1 / value for value in share.values],
            median=share.median and 1 / share.median,
            low=share.high and 1 / share.high,
            high=share.low and 1 / share.low,
        ),
        limit=OVER_THE_IDEAL,
        unit="x",
        bound=1.0,
    )


class _Pause(torch.autograd.Function):
    """A layer that takes its time in both directions, the backward pass twice as long."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, pause_s: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.pause_s = gradient, pause_s
        time.sleep(pause_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(2 * ctx.pause_s)
        return of_x, ctx.gradient, None, None


class Paused(nn.Module):
    """Layers that compute nothing, and whose gradients are those given."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self.weights = nn.ParameterList(torch.zeros_like(each) for each in gradients)

    def forward(self) -> torch.Tensor:
        x, pause_s = torch.zeros(()), PAUSE_S / 3 / len(self.gradients)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            x = _Pause.apply(x, weight, gradient, pause_s)  # type: ignore[no-untyped-call]
        return x


def paused_steps(
    rank: int, world_size: int, specs: Sequence[str], steps: int, num_parameters: int
) -> dict[str, list[tuple[float, float]]]:
    """By strategy, of its steps, which take turns: seconds of the slowest rank, and seconds of this
    rank's processor.
    """
    generator = torch.Generator().manual_seed(rank)
    shape = (num_parameters // PAUSED_LAYERS,)
    gradients = [torch.randn(shape, generator=generator) for _ in range(PAUSED_LAYERS)]
    found: dict[str, list[tuple[float, float]]] = {spec: [] for spec in specs}
    with ExitStack() as stack:
        trained = {}
        for spec in specs:
            model = Paused(gradients)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            stack.enter_context(offbeat.attach(model, optimizer, spec))
            trained[spec] = model, optimizer
        for turn in range(PAUSED_WARM_UP + steps):
            for spec in specs if turn % 2 else reversed(specs):
                model, optimizer = trained[spec]
                dist.barrier()
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
                slowest_s = torch.tensor(took_s, dtype=torch.float64)
                dist.all_reduce(slowest_s, dist.ReduceOp.MAX)  # the root of a tree is done first
                if turn >= PAUSED_WARM_UP:
                    found[spec].append((slowest_s.item(), cpu_s))
    return found


def paused(
    rate_bit_per_s: float, workers: int, specs: Sequence[str], steps: int, num_parameters: int
) -> Iterator[Figure]:
    """Steps without computing, in seconds and over those of gTop-k at the paper's density."""
    found = run_ranks(
        paused_steps,
        workers,
        specs,
        steps,
        num_parameters,
        link=LinkSpec(rate_bit_per_s=rate_bit_per_s),
    )
    column = f"{rate_bit_per_s / 1e6:g} Mbit/s"
    for spec, taken in found.items():
        cell = partial(Figure, table=PAUSED_TABLE, case=f"{workers} workers, {spec}")
        if spec != PAUSED_BASE or specs == PAUSED["methods"]:
            yield cell(column=column, value=median(s for s, _ in taken), decimals=3)
            busy_s = median(cpu_s for _, cpu_s in taken)
            yield cell(column=f"of a processor, {column}", value=busy_s, decimals=3)
        if spec != PAUSED_BASE:
            pairs = [(a, b) for (a, _), (b, _) in zip(taken, found[PAUSED_BASE], strict=True)]
            over = ratio("", pairs, at_least=1.0, bound=float("inf"))
            yield Figure(
                table=PAUSED_RATIOS,
                case=f"{workers} workers, {spec}",
                column=column,
                value=over.value,
                interval=over.interval,
                decimals=2,
            )


def at_most(case: str, measured: Estimate, *, limit: float, unit: str, bound: float) -> Ratio:
    """Whether `measured` keeps to a limit.

    Args:
        case: what was measured.
        measured: in `unit`.
        limit: in `unit`.
        unit: "x" for a ratio.
        bound: the least there can be; infinite: unknown.
    """
    assert measured.median is not None, case
    low, high = measured.low or measured.median, measured.high or measured.median
    return Ratio(
        case=case,
        value=measured.median,
        unit=unit,
        goal=f"at most {limit:g}",
        holds="undecided" if low <= limit < high else high <= limit,
        bound=bound,
        interval=(low, high),
    )


def paused_cells(rates: Sequence[float], *, steps: int | None, num_parameters: int) -> Cells:
    return {
        f"paused, {name}, {workers} workers, {rate / 1e6:g} Mbit/s": partial(
            paused, rate, workers, specs, steps or PAUSED_STEPS[rate], num_parameters
        )
        for name, specs in PAUSED.items()
        for rate in rates
        for workers in PAUSED_WORKERS
    }


def cells(directory: Path, rates: Sequence[float], *, line_only: bool) -> Cells:
    found: dict[str, Callable[[], Iterable[Row]]] = {"several receivers": partial(fan_outs, 1e9)}
    for rate_bit_per_s in rates:
        name = f"{rate_bit_per_s / 1e6:g} Mbit/s"
        found[f"line of {name}"] = partial(lambda rate: [line_rate(rate)], rate_bit_per_s)
        if not line_only:
            found[f"strategies at {name}"] = partial(strategies, rate_bit_per_s, directory)
            found[f"as it comes at {name}"] = partial(as_it_comes, rate_bit_per_s, directory)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--line-only", action="store_true", help="only see whether links keep to their rates"
    )
    which.add_argument(
        "--paused-only", action="store_true", help="only steps whose computing is a pause"
    )
    parser.add_argument("--steps", type=int, help="of each paused strategy")
    parser.add_argument(
        "--parameters", type=int, default=PAUSED_PARAMETERS, help="of what is paused"
    )
    parser.add_argument(
        "--rates",
        default=",".join(f"{rate / 1e6:g}" for rate in GOALS),
        help="of links, in Mbit/s; default: %(default)s",
    )
    arguments = parser.parse_args()
    rates = [float(rate) * 1e6 for rate in arguments.rates.split(",")]
    if unknown := set(rates) - set(GOALS):
        raise SystemExit(f"no rates: {unknown}; there are {list(GOALS)} bit/s")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        found_cells = (
            paused_cells(rates, steps=arguments.steps, num_parameters=arguments.parameters)
            if arguments.paused_only
            else cells(directory, rates, line_only=arguments.line_only)
        )
        present(found_cells, arguments, seeds=1)
