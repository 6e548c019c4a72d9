"""What unequal speeds cost in time and quality: Adaptive SGD at 2:1 against synchronous training
and against one device.

Task `xmc` on four workers, two of them half as fast; padded steps, a link of 1 Gbit/s imitated in
user space, or none with `--mbit-per-s inf`. Strategies see the same samples in the same order,
each with the learning rate of its own that gets it to the target first with the first seed (`one`:
furthest):

    adaptive    AdaptiveSGD, merged once a mega-batch
    ddp         gradients averaged in each step, equal batches: the slowest worker decides
    tuned       the same, with batches in proportion to speeds, as somebody who knows them would
    choose; weighted by samples one         one worker, with batches as large as those of the four
    together; nobody looks at its time

The target is 95% of the best precision of the first label that one device reaches, mean over seeds:
what is lost in the end is analysed apart. Time is that of training, without measuring.

    time to the target: at most 1/1.4 of ddp's, and no more than that of tuned
    precision after equally many samples: at most 0.5 points below that of one device

    python benchmarks/studies/uneven_accuracy.py [--json] [--quick] [--seeds N] [--epochs N]
        [--optimizer NAME] [--lrs NUMBER,...] [--mega-batch N] [--mbit-per-s NUMBER]
        [--train FILE --test FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import _benchmarks  # noqa: F401
import offbeat
from _ceilings import gain
from _measure import Ratio, Row, add_output_options, present
from _ranks import run_ranks
from _results import Figure
from offbeat.arithmetic.costs import LinkCost
from offbeat.megabatch.loader import DispatchLoader
from offbeat.session.attach import attach_through
from offbeat.transport.driver import Driver
from offbeat_lab.cluster import Cluster
from offbeat_lab.emulation.delaying import Delaying, StepTimeEmulator
from offbeat_lab.tasks import Batch, build_task, num_samples_of

SPEEDS = (1.0, 1.0, 0.5, 0.5)
BATCH = 16
STEP_S = 0.02
LATENCY_S = 1e-4
TARGET = 0.95
STRATEGIES = ("adaptive", "ddp", "tuned", "one")
Curve = Sequence[tuple[float, float]]
"""Seconds of training and the metric, as often as it was measured; the first before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to train, and how long.

    Attributes:
        paths: of the data; empty for those that are bundled.
        optimizer: of the task; learning rates follow batch sizes as they should with sgd.
        epochs: passes over the data.
        mega_batch: batches between merges.
        step_s: what a batch takes a worker of speed 1.
        rate_bit_per_s: of each worker's link; infinite: nothing is imitated.
    """

    paths: Mapping[str, str]
    optimizer: str
    epochs: int
    mega_batch: int
    step_s: float
    rate_bit_per_s: float


def train(rank: int, world_size: int, strategy: str, asked: Asked, lr: float, seed: int) -> Curve:
    """One run of one strategy, as a rank of it."""
    speeds = SPEEDS[:world_size]
    task = build_task(
        "xmc", {**asked.paths, "optimizer": asked.optimizer, "lr": lr, "batch_size": BATCH}
    )
    model = task.build_model(seed)
    optimizer = task.optimizer(model)
    step_s = asked.step_s if world_size > 1 else None
    step_time = StepTimeEmulator(
        Cluster(workers=world_size, speeds=speeds, step_s=step_s), rank, by_sleeping=False
    )
    adaptive = strategy == "adaptive"
    trained = offbeat.AdaptiveSGD(mega_batch=asked.mega_batch) if adaptive else offbeat.AllReduce()
    sizes = (
        _tuned(speeds) if strategy == "tuned" else [BATCH * len(SPEEDS) // world_size] * world_size
    )

    def collate(samples: list[int]) -> Batch:
        return task.batch(np.array(samples, dtype=np.int64))

    def slow(driver: Driver) -> Driver:
        rate = asked.rate_bit_per_s
        return (
            Delaying(driver, LinkCost(alpha_s=LATENCY_S, beta_s_per_byte=8 / rate))
            if np.isfinite(rate)
            else driver
        )

    with attach_through(slow, model, optimizer, trained) as session:
        loader = session.loader(
            range(task.num_samples),
            seed=seed,
            batch_size=BATCH if adaptive else sizes[rank],
            collate=collate,
        )
        seconds, curve = 0.0, [(0.0, task.evaluate(model))]
        while loader.epoch < asked.epochs:
            begun_s = time.monotonic()
            for batch in loader.one_mega_batch() if isinstance(loader, DispatchLoader) else loader:
                step_time.begin_step(1)
                loss = task.loss(model, batch)
                step_time.before_backward(seconds, size=num_samples_of(batch) / BATCH)
                with step_time.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds += time.monotonic() - begun_s
            merged = session.averaged_model() if adaptive else model
            if rank == 0:
                curve.append((seconds, task.evaluate(merged)))
            torch.distributed.barrier()
    return curve


def _tuned(speeds: Sequence[float]) -> list[int]:
    """Batches in proportion to speeds, as large as equal ones together."""
    return [round(BATCH * len(speeds) * speed / sum(speeds)) for speed in speeds]


def run(strategy: str, asked: Asked, lr: float, seed: int) -> Curve:
    curve = run_ranks(train, 1 if strategy == "one" else len(SPEEDS), strategy, asked, lr, seed)
    print(
        f"{strategy}, lr {lr:g}, seed {seed}: {curve[-1][0]:.1f} s, at best {best_of(curve):.4f}",
        file=sys.stderr,
        flush=True,
    )
    return [(float(seconds), float(metric)) for seconds, metric in curve]


def time_to(curve: Curve, target: float) -> float:
    """Seconds, on a straight line between measurements; infinity if it never gets there."""
    for (before_s, before), (after_s, after) in pairwise(curve):
        if after >= target:
            return before_s + (after_s - before_s) * max(0.0, (target - before) / (after - before))
    return float("inf")


def best_of(curve: Curve) -> float:
    return max(metric for _, metric in curve)


def first_to(curves: Mapping[float, Curve], target: float) -> float:
    """The learning rate with which the target is reached first; the one that gets furthest, where
    none gets there.
    """
    return min(curves, key=lambda lr: (time_to(curves[lr], target), -best_of(curves[lr])))


def cases(asked: Asked, lrs: Sequence[float], seeds: Sequence[int]) -> Iterator[Row]:
    trials = {name: {lr: run(name, asked, lr, seeds[0]) for lr in lrs} for name in STRATEGIES}
    rates = {"one": max(lrs, key=lambda lr: best_of(trials["one"][lr]))}

    def curves_of(name: str) -> list[Curve]:
        return [
            trials[name][rates[name]],
            *(run(name, asked, rates[name], seed) for seed in seeds[1:]),
        ]

    curves = {"one": curves_of("one")}
    target = TARGET * float(np.mean([best_of(curve) for curve in curves["one"]]))
    for name in STRATEGIES[:-1]:
        rates[name] = first_to(trials[name], target)
        curves[name] = curves_of(name)
    best = {name: [best_of(curve) for curve in those] for name, those in curves.items()}
    times = {name: [time_to(curve, target) for curve in those] for name, those in curves.items()}
    yield from figures(target, rates, best, times)
    for other, limit, bound in (("ddp", 1 / 1.4, 1 / gain(SPEEDS)), ("tuned", 1.0, 1.0)):
        ratios = [mine / its for mine, its in zip(times["adaptive"], times[other], strict=True)]
        value = float(np.median(times["adaptive"]) / np.median(times[other]))
        yield row(f"time to {target:.4f}, over {other}'s", "x", ratios, value, limit, bound)
    gaps = [100 * (one - mine) for one, mine in zip(best["one"], best["adaptive"], strict=True)]
    yield row("precision below one device's", "points", gaps, float(np.mean(gaps)), 0.5, 0.0)


def row(
    case: str, unit: str, values: Sequence[float], value: float, limit: float, bound: float
) -> Ratio:
    low, high = min(values), max(values)
    return Ratio(
        case=case,
        value=value,
        unit=unit,
        goal=f"at most {limit:.3g}",
        holds="undecided" if low < limit < high else high <= limit,
        bound=bound,
        interval=(low, high),
    )


def figures(
    target: float,
    rates: Mapping[str, float],
    best: Mapping[str, Sequence[float]],
    times: Mapping[str, Sequence[float]],
) -> Iterator[Figure]:
    """What the page shows of each strategy. Nobody looks at the time of one device."""
    for name in STRATEGIES:
        cell = partial(Figure, table="strategies", case=name)
        yield cell(column="learning rate", value=rates[name])
        yield cell(column="best precision, by seed", value=tuple(best[name]), decimals=4)
        if name != "one":
            reached = tuple(s if np.isfinite(s) else None for s in times[name])
            yield cell(column=f"seconds to {target:.4f}", value=reached, decimals=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, one rate, 2 epochs, steps of 5 ms: only to see that it runs",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--optimizer", default="adagrad", help="adagrad, sgd or adam; default: %(default)s"
    )
    parser.add_argument("--lrs", default="0.05,0.1", help="to choose from; default: %(default)s")
    parser.add_argument("--mega-batch", type=int, default=100, help="default: %(default)s")
    parser.add_argument(
        "--mbit-per-s", type=float, default=1000, help="of each worker's link; default: %(default)s"
    )
    parser.add_argument(
        "--train",
        help="data in the Extreme Classification Repository's format; default: the bundled task",
    )
    parser.add_argument("--test", help="data held out; needed with --train")
    given = parser.parse_args()
    asked = Asked(
        paths={} if given.train is None else {"path": given.train, "test_path": given.test},
        optimizer=given.optimizer,
        epochs=2 if given.quick else given.epochs,
        mega_batch=given.mega_batch,
        step_s=0.005 if given.quick else STEP_S,
        rate_bit_per_s=given.mbit_per_s * 1e6,
    )
    lrs = [float(lr) for lr in given.lrs.split(",")][: 1 if given.quick else None]
    seeds = 1 if given.quick else given.seeds
    cell = "bundled data" if given.train is None else Path(given.train).name
    present({cell: partial(cases, asked, lrs, range(seeds))}, given, seeds=seeds)
