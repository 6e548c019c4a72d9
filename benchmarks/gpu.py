"""What a GPU is asked for: selection against the speed of its memory, steps of a model of 125 M
parameters against DDP, waits of the host, and K-FAC of ResNet-50.

One process on one GPU, a world of one, so that nothing but offbeat's own work is added; and two
processes on one GPU, whose messages go over loopback.

    python benchmarks/gpu.py [--json] [--quick] [--results DIR]

`--quick` takes small sizes, and the CPU where there is no GPU: only to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from _measure import Row, add_output_options, interleave, present, ratio
from _ranks import run_ranks
from _results import Figure
from offbeat.codec import cuda
from offbeat.strategies.base import Strategy
from offbeat_lab.plan.shipped import low_rank_bound, shipped_profile
from offbeat_lab.plan.timing import hook_s, own_low_rank_s, usual_s

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES_AN_ELEMENT = 12
"""Read the residual and the gradient, write their sum."""

SMALL_BATCH, LARGE_BATCH = 4_096, 32_768
"""Tokens in a step. With the smaller number a host launches kernels more slowly than an H100
carries them out, so that whatever the host does besides makes the step longer.
"""
PERIOD = 4
"""How many steps are timed at once, and those between two averages of LocalSGD."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": lambda: offbeat.AllReduce(),
    "GTopK": lambda: offbeat.GTopK(density=0.001, collective="reduce_scatter", warmup=None),
    "PowerSGD": lambda: offbeat.PowerSGD(rank=1),
    "LocalSGD": lambda: offbeat.LocalSGD(period=PERIOD, warmup=0),
    "WAGMA": lambda: offbeat.WAGMA(),
}


def wait_for_device() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], object], times: int = 1) -> float:
    """Seconds of a call, the mean of so many."""
    wait_for_device()
    begin_s = time.perf_counter()
    for _ in range(times):
        function()
    wait_for_device()
    return (time.perf_counter() - begin_s) / times


class Block(torch.nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.attend, self.join = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        more: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
        return x + more


class Transformer(torch.nn.Module):
    """A language model of GPT-2's shape: 124 M parameters with 12 layers of width 768."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.words(words)))
        return torch.nn.functional.linear(hidden, self.words.weight)


def transformer(quick: bool) -> Transformer:
    torch.manual_seed(0)
    shape = (2, 64, 500) if quick else (12, 768, 50_304)
    return Transformer(*shape).to(DEVICE)


def trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    quick: bool,
    num_tokens: int = SMALL_BATCH,
) -> Callable[[], None]:
    """A step in bfloat16 autocast."""
    length, vocabulary = (32, 500) if quick else (512, 50_304)
    batch = max(1, num_tokens // 16 // length) if quick else num_tokens // length
    words = torch.randint(vocabulary, (batch, length + 1), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), words[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE.type == "cuda")


def selection(quick: bool) -> Iterator[Row]:
    """The largest .1% of 10^8 entries, against a copy of as many bytes."""
    n = 200_000 if quick else 100_000_000
    k = n // 1000
    flat, residual = (torch.randn(n, device=DEVICE) for _ in range(2))
    other = torch.empty_like(flat)
    picked = cuda.exact(flat.clone(), residual, k=k, weight=1.0).sparse
    threshold = float(abs(picked.values).min())
    # A selection overwrites the gradient, which then holds sums with the residual: so many rounds
    # keep them finite.
    measured = {
        "copy": lambda: timed(lambda: other.copy_(flat)),
        "exact": lambda: timed(lambda: cuda.exact(flat, residual, k=k, weight=1.0)),
        "reuse": lambda: timed(
            lambda: cuda.reuse(flat.normal_(), residual, k=k, weight=1.0, threshold=threshold)
        ),
        "draw": lambda: timed(lambda: flat.normal_()),
        "torch.topk": lambda: timed(
            lambda: torch.add(residual, flat, out=flat).abs().topk(k, sorted=False)
        ),
    }
    times = interleave(measured, num_rounds=3 if quick else 11)
    bound = [each * BYTES_AN_ELEMENT / 8 for each in times["copy"]]
    reuse = [max(a - b, 1e-9) for a, b in zip(times["reuse"], times["draw"], strict=True)]
    for name, seconds in {**times, "reuse": reuse}.items():
        if name != "draw":
            yield Figure(
                case=name,
                table="selection",
                column="ms",
                value=1e3 * sorted(seconds)[len(seconds) // 2],
                bound=None if name == "copy" else 1e3 * sorted(bound)[len(bound) // 2],
            )
    for name, seconds in (("exact", times["exact"]), ("reuse", reuse)):
        yield ratio(
            f"{name} selection over the memory's bound",
            list(zip(seconds, bound, strict=True)),
            bound=1.0,
            at_most=1.5,
        )


def steps(num_tokens: int, quick: bool) -> Iterator[Row]:
    """A step of each strategy over one of DDP, a world of one."""
    directory = tempfile.mkdtemp()
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1
    )
    try:
        times = _steps(num_tokens, quick)
    finally:
        dist.destroy_process_group()
    for name, each in times.items():
        for column in ("plain", "DDP", name):
            yield Figure(
                case=f"{name}, {num_tokens:,} tokens",
                table="steps",
                column="offbeat, ms" if column == name else f"{column}, ms",
                value=1e3 * sorted(each[column])[len(each[column]) // 2],
            )
    for name, each in times.items():
        yield ratio(
            f"{name}, a step of {num_tokens:,} tokens over DDP's",
            list(zip(each[name], each["DDP"], strict=True)),
            bound=1.0,
            at_most=1.05 if name in ("AllReduce", "LocalSGD") else 1.2,
        )


def _steps(num_tokens: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """By strategy, the seconds of its steps and of those taken in turns with them."""
    plain, ddp = transformer(quick), DistributedDataParallel(transformer(quick))
    alone = trainer(plain, adam(plain), quick=quick, num_tokens=num_tokens)
    wrapped = trainer(ddp, adam(ddp), quick=quick, num_tokens=num_tokens)
    times: dict[str, dict[str, list[float]]] = {}
    for name, make in STRATEGIES.items():
        model = transformer(quick)
        optimizer = adam(model)
        step = trainer(model, optimizer, quick=quick, num_tokens=num_tokens)
        with offbeat.attach(model, optimizer, make()):
            for _ in range(PERIOD):
                step(), wrapped(), alone()
            times[name] = interleave(
                {
                    "plain": partial(timed, alone, PERIOD),
                    "DDP": partial(timed, wrapped, PERIOD),
                    name: partial(timed, step, PERIOD),
                },
                num_rounds=3 if quick else 7,
            )
        del model, optimizer, step
    return times


def two_ranks(quick: bool) -> Iterator[Row]:
    """Two ranks on one device, a step of each strategy over one of DDP by gloo."""
    times: Mapping[str, list[float]] = run_ranks(_two_ranks, 2, quick)
    for name, seconds in times.items():
        yield Figure(
            case=name,
            table="two ranks on one GPU, over loopback",
            column="ms a step",
            value=1e3 * sorted(seconds)[len(seconds) // 2],
        )


def _two_ranks(rank: int, world_size: int, quick: bool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    num_rounds = 1 if quick else 3
    for name, make in {"DDP by gloo": None, **STRATEGIES}.items():
        model: torch.nn.Module = transformer(quick)
        optimizer = adam(model)
        session: Any = None
        if make is None:
            model = DistributedDataParallel(model)
        else:
            session = offbeat.attach(model, optimizer, make())
        step = trainer(model, optimizer, quick=quick, num_tokens=SMALL_BATCH // 2)
        found[name] = [timed(step, PERIOD) for _ in range(num_rounds + 1)][1:]
        if session is not None:
            session.close()
        del model, optimizer, step
    return found


def waits(quick: bool) -> Iterator[Row]:
    """How often the host waits for the device in one step, and where."""
    if DEVICE.type != "cuda":
        return
    for name, make in STRATEGIES.items():
        model = transformer(quick)
        optimizer = adam(model)
        step = trainer(model, optimizer, quick=quick)
        with offbeat.attach(model, optimizer, make()):
            step(), step()
            lines = waited(step)
        yield from figures_of_waits(name, "waits", lines)


def waited(step: Callable[[], None]) -> Counter[str]:
    """Lines of code at which the host waits for the device in a step, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message)
    )


def figures_of_waits(case: str, table: str, lines: Counter[str]) -> Iterator[Row]:
    yield Figure(
        case=case, table=table, column="waits a step", value=sum(lines.values()), decimals=0
    )
    where = ", ".join(f"{line} ({count})" for line, count in lines.most_common())
    yield Figure(case=case, table=table, column="where", value=where or "nowhere")


NETWORKS = ("resnet20", "resnet50", "gpt2", "vgg16")
RANKS = (1, 4)


def low_rank(quick: bool) -> Iterator[Row]:
    """What PowerSGD computes for a model's gradients, in a world of one, beside 44 bytes an element
    at the speed of a copy, which is what the accesses of torch's hook take at least.
    """
    source, target = torch.zeros(2, 1 << 20 if quick else 1 << 27, device=DEVICE)
    bytes_per_s = 2 * source.nbytes / usual_s(lambda: target.copy_(source), DEVICE)
    for name in NETWORKS[:1] if quick else NETWORKS:
        parameters = [
            torch.nn.Parameter(
                torch.zeros(each.num_elements, device=DEVICE).view(each.rows, -1).squeeze(0)
            )
            for each in shipped_profile(name).tensors
        ]
        num_elements = sum(parameter.numel() for parameter in parameters)
        case = f"{name}: {len(parameters)} tensors, {num_elements / 1e6:.3g} M"
        for column, seconds in (("torch's hook", hook_s), ("offbeat", own_low_rank_s)):
            for rank in RANKS:
                yield Figure(
                    case=case,
                    table="low rank",
                    column=f"{column}, rank {rank}, ms",
                    value=1e3 * seconds(parameters, rank),
                    bound=1e3 * low_rank_bound(bytes_per_s) * num_elements,
                )


def outer(quick: bool) -> Iterator[Row]:
    """Memory of the device that an outer optimizer takes, and an average's time, a world of one."""
    model = transformer(quick)
    optimizer = adam(model)
    step = trainer(model, optimizer, quick=quick)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    makes: dict[str, Callable[[], Strategy]] = {
        "none": lambda: offbeat.LocalSGD(period=PERIOD, warmup=0),
        "on the device": lambda: offbeat.LocalSGD(period=PERIOD, warmup=0, outer=offbeat.Outer()),
        "on the host": lambda: offbeat.LocalSGD(
            period=PERIOD, warmup=0, outer=offbeat.Outer(offload=True)
        ),
    }
    for name, make in makes.items():
        with offbeat.attach(model, optimizer, make()):
            for _ in range(2 * PERIOD):
                step()
            seconds = [[timed(step) for _ in range(PERIOD)] for _ in range(3 if quick else 7)]
            if DEVICE.type == "cuda":
                kept = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for _ in range(PERIOD):
                    step()
                peak = torch.cuda.max_memory_allocated()
                for column, value in (("kept", kept), ("at most", peak)):
                    yield Figure(
                        case=name,
                        table="outer",
                        column=f"{column}, bytes a parameter",
                        value=value / num_elements,
                    )
        for column, each in (
            ("step with an average, ms", [period[-1] for period in seconds]),
            ("other steps, ms", [period[1] for period in seconds]),
        ):
            median_ms = 1e3 * sorted(each)[len(each) // 2]
            yield Figure(case=name, table="outer", column=column, value=median_ms)
        gc.collect()  # callbacks refer to each other


INTERVAL = 10
"""Steps from one with factors and inversions to the next."""
UPDATE, PRECONDITION = "K-FAC, factors and inverses", "K-FAC, preconditions alone"


class Images:
    """Trains a network on one batch of images."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, size: int, batch: int
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._images = torch.randn(batch, 3, size, size, device=DEVICE)
        self._labels = torch.randint(10, (batch,), device=DEVICE)

    def passes(self) -> None:
        torch.nn.functional.cross_entropy(self._model(self._images), self._labels).backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        self.passes()
        self.update()


def kfac(quick: bool) -> Iterator[Row]:
    """ResNet-50 under SPD-KFAC, with factors and inverses of every tenth step: what either kind of
    step takes, and where.
    """
    if quick:
        layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())

        def network() -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Sequential(*deepcopy(layers), torch.nn.Linear(784, 10)).to(DEVICE)

    else:
        from torchvision.models import resnet50  # type: ignore[import-not-found, unused-ignore]

        def network() -> torch.nn.Module:
            torch.manual_seed(0)
            found: torch.nn.Module = resnet50(num_classes=1000).to(DEVICE)
            return found

    def images(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Images:
        return Images(model, optimizer, size=16 if quick else 224, batch=2 if quick else 32)

    plain, model = network(), network()
    alone = images(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ours = images(model, optimizer)
    strategy = offbeat.SPDKFAC(factor_interval=INTERVAL, inverse_interval=INTERVAL)
    times: dict[tuple[str, str], list[float]] = {}
    with offbeat.attach(model, optimizer, strategy):
        # The first two periods warm up. Parts are timed in periods of their own, because waiting
        # between them takes away what the host does ahead of the device.
        for number in range(2 + (2 if quick else 8)):
            for place in range(INTERVAL):
                for trained, kind in ((ours, PRECONDITION if place else UPDATE), (alone, "SGD")):
                    parts = {"whole": trained.step}
                    if number % 2:
                        parts = {"passes": trained.passes, "optimizer.step": trained.update}
                    for part, run in parts.items():
                        seconds = timed(run)
                        if number >= 2:
                            times.setdefault((kind, part), []).append(seconds)
        for (kind, part), found in times.items():
            yield Figure(
                case=kind,
                table="kfac",
                column=f"{part}, ms",
                value=1e3 * sorted(found)[len(found) // 2],
            )
        if DEVICE.type == "cuda":
            lines = [waited(ours.step) for _ in range(INTERVAL)]
            for kind, some in ((UPDATE, lines[0]), (PRECONDITION, lines[1])):
                yield from figures_of_waits(kind, "kfac", some)
        kernels = [busy_ms(ours.step) for _ in range(2)]
        for kind, busy in zip((UPDATE, PRECONDITION), kernels, strict=True):
            value = sum(busy.values())
            yield Figure(case=kind, table="kfac", column="device busy, ms", value=value)
            for name, ms in busy.most_common(8):
                yield Figure(case=name, table=f"kernels: {kind}", column="ms", value=ms)


def busy_ms(step: Callable[[], None]) -> Counter[str]:
    """For how long each kernel runs in a step, by name; on a CPU, each operation."""
    kinds = torch.profiler.ProfilerActivity
    on_gpu = DEVICE.type == "cuda"
    wait_for_device()
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profile:
        step()
        wait_for_device()
    found: Counter[str] = Counter()
    for each in profile.key_averages():
        is_kernel = (each.device_type == torch.autograd.DeviceType.CPU) != on_gpu
        if is_kernel and "#" not in each.key:  # a range that an optimizer names, and no kernel
            time_us = each.self_device_time_total if on_gpu else each.self_cpu_time_total
            found[short_name(each.key)] += time_us / 1e3
    return found


def short_name(kernel: str) -> str:
    """A kernel's name without what it returns and gets, and what it computes if that is told."""
    kernel = kernel.replace("(anonymous namespace)::", "")
    told = r"\w*Functor\w*|cutlass_\w+|\w+_kernel_cuda\b|\w+Ops\b"
    functor = re.search(told, kernel.partition("<")[2])
    name = re.split(r"[<(]", kernel.removeprefix("void "))[0].rpartition("::")[2] or kernel
    return (f"{name}: {functor[0]}" if functor else name)[:60]


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: only to see that it runs"
    )
    parser.add_argument("--cells", default="", help="some of them, separated by commas")
    asked = parser.parse_args()
    cells = {
        "selection": lambda: selection(asked.quick),
        "waits": lambda: waits(asked.quick),
        "steps": lambda: steps(SMALL_BATCH, asked.quick),
        "long steps": lambda: steps(LARGE_BATCH, asked.quick),
        "low rank": lambda: low_rank(asked.quick),
        "outer": lambda: outer(asked.quick),
        "two ranks": lambda: two_ranks(asked.quick),
        "kfac": lambda: kfac(asked.quick),
    }
    wanted = [each for each in asked.cells.split(",") if each] or list(cells)
    present({name: cells[name] for name in wanted}, asked)


if __name__ == "__main__":
    main()
