"""Where SPD-KFAC ends at a learning rate that was chosen for plain gradients, by `grafting`, beside
plain gradients after equally many steps: one process, one thread.

`tutorial` is a linear model of 20 inputs, as in PyTorch's tutorial on DistributedDataParallel, and
`regression` a network of three linear layers; both are trained with SGD on mean squared errors. The
other tasks are those of `offbeat train`. What is compared is the error at the end, on samples that
were not trained on: squares, the share of wrong answers, or bits of a character.

    error with "floor" over the error of plain gradients: at most 1.1

    python benchmarks/studies/kfac_grafting.py [--json] [--quick] [--photos NPZ] [--text FILE]
        [--results DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

import _benchmarks  # noqa: F401
import offbeat
from _measure import Row, add_output_options, present, ratio
from _results import Figure
from offbeat.errors import NonFiniteError
from offbeat.kfac.curvature import Grafting
from offbeat.strategies.base import Strategy
from offbeat_lab.tasks import build_task

SEEDS = (1, 2, 3)
AT_MOST = 1.1
PLAIN = "plain gradients"
GRAFTING: Final[tuple[Grafting, ...]] = ("none", "floor", "layer")
NUM_INPUTS, NUM_SAMPLES, BATCH_SIZE = 20, 2048, 32

Run = Callable[[Strategy | None, int, int], float]
"""Trains with a strategy, a seed and so many steps, and returns the error; nan: it diverged."""


def regression(
    strategy: Strategy | None, seed: int, steps: int, *, lr: float, momentum: float, is_deep: bool
) -> float:
    """With a network of two hidden layers, `is_deep`, or a linear model."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * NUM_SAMPLES, NUM_INPUTS, generator=draw)
    y = x @ torch.randn(NUM_INPUTS, 1, generator=draw)
    torch.manual_seed(seed)
    if is_deep:
        y = 3 * y.tanh() + x @ torch.randn(NUM_INPUTS, 1, generator=draw)
        hidden = nn.Linear(NUM_INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        model = nn.Sequential(*hidden, nn.Linear(64, 1))
    else:
        model = nn.Sequential(nn.Linear(NUM_INPUTS, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def loss_of_step(step: int) -> torch.Tensor:
        chosen = torch.randint(0, NUM_SAMPLES, (BATCH_SIZE,), generator=draw)
        return functional.mse_loss(model(x[chosen]), y[chosen])

    if not train(model, optimizer, strategy, loss_of_step, steps):
        return nan
    with torch.no_grad():
        return float(functional.mse_loss(model(x[NUM_SAMPLES:]), y[NUM_SAMPLES:]))


def task(
    strategy: Strategy | None, seed: int, steps: int, *, name: str, options: dict[str, str]
) -> float:
    """A task of `offbeat train`, in a world of one."""
    found = build_task(name, options)
    model = found.build_model(seed)
    optimizer = found.optimizer(model)
    batches = (
        batch
        for epoch in range(steps)
        for batch in found.batches(seed=seed, epoch=epoch, rank=0, world_size=1)
    )

    def loss_of_step(step: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = found.lr_at(step / steps)
        return found.loss(model, next(batches))

    if not train(model, optimizer, strategy, loss_of_step, steps):
        return nan
    metric = found.evaluate(model.eval())
    return 1 - metric if found.higher_is_better else metric


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | None,
    loss_of_step: Callable[[int], torch.Tensor],
    steps: int,
) -> bool:
    """Whether it did not diverge."""
    with offbeat.attach(model, optimizer, strategy or offbeat.AllReduce()):
        try:
            for step in range(steps):
                loss_of_step(step).backward()
                optimizer.step()
                optimizer.zero_grad()
        except NonFiniteError:
            return False
    return True


def cell(
    name: str, run: Run, steps: int, *, loss_terms: Literal["example", "position"] = "example"
) -> Iterator[Row]:
    errors: dict[str, list[float]] = {PLAIN: [run(None, seed, steps) for seed in SEEDS]}
    for grafting in GRAFTING:
        strategy = offbeat.SPDKFAC(
            grafting=grafting, curvature=offbeat.Curvature(loss_terms=loss_terms)
        )
        errors[grafting] = [run(strategy, seed, steps) for seed in SEEDS]
    for column, found in errors.items():
        mean = sum(found) / len(found)
        value = mean if isfinite(mean) else "diverged with one seed at least"
        yield Figure(table="errors", case=name, column=column, value=value, decimals=4)
    pairs = list(zip(errors["floor"], errors[PLAIN], strict=True))
    if all(isfinite(error) for pair in pairs for error in pair):
        case = f"{name}, error over that of plain gradients"
        yield ratio(case, pairs, bound=inf, at_most=AT_MOST)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="two steps, only to see that it runs")
    parser.add_argument("--photos", type=Path, help="npz file of images")
    parser.add_argument("--text", type=Path, help="a text")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cells = {}

    def add(name: str, run: Run, steps: int, **options: Any) -> None:
        cells[name] = partial(cell, name, run, 2 if asked.quick else steps, **options)

    for lr in (0.001, 0.003):
        run = partial(regression, lr=lr, momentum=0.0, is_deep=False)
        add(f"tutorial, SGD {lr:g}", run, 320)
    for lr in (0.001, 0.01):
        for momentum in (0.0, 0.9):
            run = partial(regression, lr=lr, momentum=momentum, is_deep=True)
            with_momentum = f" with momentum {momentum:g}" if momentum else ""
            add(f"regression, SGD {lr:g}{with_momentum}", run, 320)
    for lr in (0.01, 0.05):
        options = {"batch_size": "128", "lr": f"{lr:g}"}
        run = partial(task, name="digits", options=options)
        add(f"digits, SGD {lr:g} with momentum 0.9", run, 160)
    if asked.text is not None:
        options = {"path": str(asked.text), "batch_size": "16", "window": "32"}
        options |= {"lr_warmup": "0.0625", "lr_schedule": "cosine"}
        for optimizer, lr in (("adamw", 0.003), ("sgd", 0.1)):
            more = options | {"optimizer": optimizer, "lr": f"{lr:g}"}
            run = partial(task, name="text", options=more)
            kind = "AdamW 0.003" if optimizer == "adamw" else "SGD 0.1 with momentum 0.9"
            add(f"text, {kind}", run, 160, loss_terms="position")
    if asked.photos is not None:
        options = {"path": str(asked.photos), "width": "16", "shrink": "2", "batch_size": "32"}
        options |= {"lr_warmup": "0.0625", "lr_schedule": "linear"}
        for lr in (0.05, 0.1):
            run = partial(task, name="images", options=options | {"lr": f"{lr:g}"})
            add(f"images, SGD {lr:g} with momentum 0.9", run, 240)
    present(cells, asked, seeds=len(SEEDS))


if __name__ == "__main__":
    main()
