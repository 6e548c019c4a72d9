"""What sparse gradients cost in accuracy after equally many samples, and which options win it back.

All ranks are computed by turns in one process: only samples count here, not seconds. Each rank has
batches, BatchNorm statistics, a residual and momentum of its own; selection, error feedback, the
messages and the collectives are the package's. The model is evaluated with the mean of the ranks'
statistics, three times at the end, and the mean of these counts.

The tables have no goals yet: the seeds that are there do not decide between neighbours. Without
`--images` nothing is measured.

Task `images`, 4 ranks x 32 samples, SGD with momentum 0.9, learning rate 0.1 with a warm-up over
1/16 of the steps and linear decay.

    python benchmarks/sparse_accuracy.py [--images NPZ] [--steps N] [--seeds N]
        [--variants NAMES] [--json] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from _measure import Row, add_output_options, present
from _results import Figure
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.selectors import Exact
from offbeat.codec.tally import Tally
from offbeat.codec.wire import Wire
from offbeat.collectives.topk_allgather import global_topk, topk_sum
from offbeat.lab.tasks import Task, build_task
from offbeat.lab.tasks.base import Batch
from offbeat.transport.virtual import VirtualCluster

MOMENTUM = 0.9
BASELINE = "allreduce"
LAST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to exchange gradients.

    Attributes:
        density: share of entries that each rank sends; 1 is AllReduce.
        apply: all entries that any rank sent, or the largest of their sum.
        momentum: of the optimizer, or DGC's momentum correction, with or without factor masking.
        scope: what the largest entries are selected from.
        dense_below: parameters of fewer elements are sent whole.
        dense_steps: so many steps at the beginning send everything.
        ranks: number of workers.
    """

    density: float = 0.01
    apply: Literal["union", "global"] = "union"
    momentum: Literal["optimizer", "masked", "unmasked"] = "masked"
    scope: Literal["model", "layer"] = "model"
    dense_below: int = 0
    dense_steps: int = 0
    ranks: int = 4


UNION = Variant()
VARIANTS = {
    BASELINE: Variant(density=1.0, momentum="optimizer"),
    "union": UNION,
    "global": replace(UNION, apply="global"),
    "union, optimizer's momentum": replace(UNION, momentum="optimizer"),
    "global, optimizer's momentum": replace(UNION, apply="global", momentum="optimizer"),
    "union, no masking": replace(UNION, momentum="unmasked"),
    "union, by layer": replace(UNION, scope="layer"),
    "union, dense below 1024": replace(UNION, dense_below=1024),
    "union, first 80 steps dense": replace(UNION, dense_steps=80),
    "union, density 0.5": replace(UNION, density=0.5),
    "union, density 0.5, no masking": replace(UNION, density=0.5, momentum="unmasked"),
    "union, density 0.05": replace(UNION, density=0.05),
    "union, density 0.05, no masking": replace(UNION, density=0.05, momentum="unmasked"),
    "union, density 0.001": replace(UNION, density=0.001),
    "allreduce, 8 ranks": Variant(density=1.0, momentum="optimizer", ranks=8),
    "union, 8 ranks": replace(UNION, ranks=8),
    "global, 8 ranks": replace(UNION, apply="global", ranks=8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one run.

    Attributes:
        metric: mean of the last measurements.
        share_sent: entries that a rank sent, as a share of all.
        mean_age: steps since the entry that is sent was sent last, a mean over entries.
    """

    metric: float
    share_sent: float
    mean_age: float


class Exchange:
    """Turns the ranks' gradients into the one that is applied, for the parameters of one scope.

    Args:
        parameters: of the scope.
        variant: how.
        whole: whether everything is sent.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], variant: Variant, *, whole: bool
    ) -> None:
        self.num_elements = sum(parameter.numel() for parameter in parameters)
        self.num_sent, self.ages = 0, 0
        self._parameters = list(parameters)
        self._variant = variant
        self._whole = whole or variant.density == 1.0
        self._feedback = [
            ErrorFeedback(
                self.num_elements,
                dtype=torch.float32,
                device=torch.device("cpu"),
                selector=Exact(),
                momentum=None if variant.momentum == "optimizer" else MOMENTUM,
                masking=variant.momentum == "masked",
            )
            for _ in range(variant.ranks)
        ]
        self._last_sent = np.zeros((variant.ranks, self.num_elements), dtype=np.int32)
        self._wire = Wire(
            num_elements=self.num_elements, num_parameters=1, dtype=np.dtype(np.float32)
        )

    def gradient(self) -> torch.Tensor:
        """What the last backward pass has left, as one vector of its own memory."""
        return torch.cat(
            [
                torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
                for p in self._parameters
            ]
        )

    def apply(self, gradients: list[torch.Tensor], step: int) -> None:
        """Write the result into `param.grad`."""
        ranks = self._variant.ranks
        if self._whole or step < self._variant.dense_steps:
            for feedback, gradient in zip(self._feedback, gradients, strict=True):
                feedback.stage_all(gradient)
            total = torch.stack(gradients).sum(dim=0)
            for feedback in self._feedback:
                feedback.commit_all()
            self.num_sent += self.num_elements
        else:
            total = self._sparse_sum(gradients, step)
        places = total.div_(ranks).split([p.numel() for p in self._parameters])
        for parameter, place in zip(self._parameters, places, strict=True):
            parameter.grad = place.view_as(parameter)

    def _sparse_sum(self, gradients: list[torch.Tensor], step: int) -> torch.Tensor:
        ranks, k = self._variant.ranks, max(1, round(self._variant.density * self.num_elements))
        tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))
        collective = topk_sum if self._variant.apply == "union" else global_topk
        work = []
        for rank, (feedback, gradient) in enumerate(zip(self._feedback, gradients, strict=True)):
            mine = feedback.stage(gradient, k).sparse
            self.num_sent += len(mine) / ranks
            self.ages += (step - self._last_sent[rank, mine.indices]).sum() / ranks
            self._last_sent[rank, mine.indices] = step
            work.append(collective(rank, ranks, mine, tally, k, self._wire))
        exchanged = VirtualCluster(ranks, seed=0).run(work)
        for feedback, one in zip(self._feedback, exchanged, strict=True):
            feedback.commit(one.owed)
        total = torch.zeros(self.num_elements)
        total[torch.from_numpy(exchanged[0].kept.indices)] = torch.from_numpy(
            exchanged[0].kept.values
        )
        return total


def exchanges_of(model: nn.Module, variant: Variant) -> list[Exchange]:
    parameters = list(model.parameters())
    whole = [p for p in parameters if p.numel() < variant.dense_below]
    rest = [p for p in parameters if p.numel() >= variant.dense_below]
    scopes = [rest] if variant.scope == "model" else [[p] for p in rest]
    return [
        *([Exchange(whole, variant, whole=True)] if whole else []),
        *(Exchange(scope, variant, whole=False) for scope in scopes),
    ]


def train(task: Task, variant: Variant, *, steps: int, seed: int) -> Outcome:
    """One run.

    Args:
        task: what is trained.
        variant: how gradients are exchanged.
        steps: how many.
        seed: of the model and the order of samples.
    """
    torch.manual_seed(seed)
    model = task.build_model(seed)
    momentum = MOMENTUM if variant.momentum == "optimizer" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    exchanges = exchanges_of(model, variant)
    statistics = [[b.clone() for b in model.buffers()] for _ in range(variant.ranks)]
    batches = [batches_of(task, seed, rank, variant.ranks) for rank in range(variant.ranks)]
    metrics = []
    for step in range(steps):
        gradients: list[list[torch.Tensor]] = [[] for _ in exchanges]
        for rank in range(variant.ranks):
            restore(model, statistics[rank])
            optimizer.zero_grad()
            task.loss(model, next(batches[rank])).backward()
            statistics[rank] = [b.clone() for b in model.buffers()]
            for mine, exchange in zip(gradients, exchanges, strict=True):
                mine.append(exchange.gradient())
        for mine, exchange in zip(gradients, exchanges, strict=True):
            exchange.apply(mine, step)
        for group in optimizer.param_groups:
            group["lr"] = task.lr_at((step + 0.5) / steps)
        optimizer.step()
        if steps - step <= LAST * (steps // 40) and (steps - step - 1) % (steps // 40) == 0:
            metrics.append(evaluate(task, model, statistics))
    elements = sum(exchange.num_elements for exchange in exchanges)
    sent = sum(exchange.num_sent for exchange in exchanges)
    return Outcome(
        metric=float(np.mean(metrics)),
        share_sent=sent / elements / steps,
        mean_age=sum(exchange.ages for exchange in exchanges) / max(sent, 1),
    )


def batches_of(task: Task, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from task.batches(seed=seed, epoch=epoch, rank=rank, world_size=world_size)
        epoch += 1


def restore(model: nn.Module, buffers: Sequence[torch.Tensor]) -> None:
    for buffer, saved in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(saved)


def evaluate(task: Task, model: nn.Module, statistics: Sequence[Sequence[torch.Tensor]]) -> float:
    """With the mean of the ranks' statistics."""
    mean = [
        torch.stack([one.double() for one in same]).mean(dim=0).to(same[0].dtype)
        for same in zip(*statistics, strict=True)
    ]
    restore(model, mean)
    model.eval()
    metric = task.evaluate(model)
    model.train()
    return metric


def run(
    name: str, variant: Variant, make: Callable[[], Task], *, steps: int, seeds: int
) -> Iterator[Row]:
    """The figures of one variant.

    Args:
        name: its row.
        variant: how gradients are exchanged.
        make: the task.
        steps: of a run.
        seeds: how many runs.
    """
    task, outcomes = make(), []
    for seed in range(seeds):
        began_s = time.perf_counter()
        outcomes.append(train(task, variant, steps=steps, seed=seed))
        print(
            f"{name}, seed {seed}: {outcomes[-1].metric:.4f} in"
            f" {time.perf_counter() - began_s:.0f} s",
            file=sys.stderr,
        )
    cell = partial(Figure, table=f"images, {steps} steps", case=name)
    by_seed = tuple(round(outcome.metric, 4) for outcome in outcomes)
    yield cell(column="accuracy by seed", value=by_seed, decimals=4)
    yield cell(column="mean", value=float(np.mean(by_seed)), decimals=4)
    yield cell(column="share sent", value=outcomes[0].share_sent, decimals=4)
    yield cell(column="steps since sent last", value=outcomes[0].mean_age, decimals=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--images", type=Path, help="npz file; without it nothing is measured")
    parser.add_argument("--steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument("--variants", help=f"names, separated by ';', of: {'; '.join(VARIANTS)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.images is None:
        print("left out: --images names no data", file=sys.stderr)
        return
    names = list(VARIANTS) if asked.variants is None else asked.variants.split(";")
    options = {"path": asked.images, "lr": 0.1, "lr_warmup": 1 / 16, "lr_schedule": "linear"}
    make = partial(build_task, "images", options)
    cells = {
        f"{name}, {asked.steps} steps": partial(
            run, name, VARIANTS[name], make, steps=asked.steps, seeds=asked.seeds
        )
        for name in names
    }
    present(cells, asked, seeds=asked.seeds)


if __name__ == "__main__":
    main()
