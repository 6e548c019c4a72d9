"""Sparse strategies under every habit that people have with learning rates, momentum and weight
decay: none of them may end far below `AllReduce`, nor explode on the way.

An oracle, not a test of a file: it knows strategies by their public names alone.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import offbeat
from ranks_support.launch import RunRanks

WORLD_SIZE, STEPS, BATCH = 2, 480, 32
DENSITY = 0.01
MAX_NORM = 1.0
DECAY = 5e-5
RATE_OF_EF21 = 1 / 3
"""What EF21's learning rate is of the others': its estimates lag behind, and the largest rate that
is stable falls with the density.
"""
MOST_POINTS_BELOW = 5.0
MOST_POINTS_BELOW_OF_EF21 = 30.0
"""EF21 is slower at such a density, as its page says: it has only to learn, and not to explode.
"""
MOST_TIMES_THE_WORST_LOSS = 10.0


class PlainSubclass(torch.optim.SGD):
    """What a strategy must not take for SGD, since it may do anything."""


MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def matrices_by(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


# The kinds of SGD move a parameter by the same multiple of a gradient in the end.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "plain SGD": lambda net: torch.optim.SGD(net.parameters(), 0.5, weight_decay=DECAY),
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=DECAY),
    "Nesterov": lambda net: torch.optim.SGD(
        net.parameters(), 0.05, momentum=0.9, weight_decay=DECAY, nesterov=True
    ),
    "dampening": lambda net: torch.optim.SGD(
        net.parameters(), 0.25, momentum=0.9, weight_decay=DECAY, dampening=0.8
    ),
    "subclass": lambda net: PlainSubclass(net.parameters(), 0.05, momentum=0.9, weight_decay=DECAY),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), 0.003),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), 0.005, weight_decay=DECAY),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters(), 0.01, weight_decay=DECAY),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), 0.03, weight_decay=DECAY),
    "Muon": lambda net: torch.optim.Muon(matrices_by(net), 0.01, weight_decay=0.01),
}

Change = Callable[[dict[str, Any]], None]


def set_momentum(group: dict[str, Any]) -> None:
    if "momentum" in group and "alpha" not in group:  # RMSprop cannot begin halfway
        group["momentum"] = 0.5
    if "betas" in group:
        group["betas"] = (0.8, 0.99)


def scale_momentum(group: dict[str, Any]) -> None:
    if "momentum" in group:
        group["momentum"] *= 0.6
    if "betas" in group:
        group["betas"] = tuple(beta * 0.99 for beta in group["betas"])


def set_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] = 20 * DECAY


def scale_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] *= 20


class Once:
    """Changes options halfway, as a callback of a training loop would."""

    def __init__(self, optimizer: torch.optim.Optimizer, change: Change) -> None:
        self._optimizer, self._change, self._num_steps = optimizer, change, 0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps == STEPS // 2:
            for group in self._optimizer.param_groups:
                self._change(group)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    rate = optimizer.param_groups[0]["lr"]
    cycles = any(optimizer.defaults.get(key) for key in ("momentum", "betas"))
    return lr_scheduler.OneCycleLR(optimizer, rate, total_steps=STEPS + 1, cycle_momentum=cycles)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    rate = optimizer.param_groups[0]["lr"]
    return lr_scheduler.CyclicLR(
        optimizer, rate / 10, rate, step_size_up=STEPS // 8, cycle_momentum=False
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "constant": lambda optimizer: Once(optimizer, lambda group: None),
    "OneCycle": one_cycle,
    "CyclicLR": cyclic,
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=STEPS // 2, eta_min=1e-6
    ),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [STEPS // 2, 3 * STEPS // 4]),
    "momentum set": lambda optimizer: Once(optimizer, set_momentum),
    "momentum scaled": lambda optimizer: Once(optimizer, scale_momentum),
    "decay set": lambda optimizer: Once(optimizer, set_decay),
    "decay scaled": lambda optimizer: Once(optimizer, scale_decay),
}
SCHEDULES |= {
    "clipped": SCHEDULES["constant"],
    "clipped now and then": SCHEDULES["constant"],
    "warm restarts, clipped": SCHEDULES["warm restarts"],
}
CLIPS: dict[str, Callable[[int], bool]] = {
    "clipped": lambda step: True,
    "clipped now and then": lambda step: step % 25 == 24,
    "warm restarts, clipped": lambda step: True,
}
"""Whether the loop clips the norm of the gradient in a step."""


def sparse(**options: Any) -> dict[str, Any]:
    """Every strategy that has a density."""
    return {
        "gtopk": offbeat.GTopK(density=DENSITY, collective="reduce_scatter", **options),
        "gtopk all_gather": offbeat.GTopK(density=DENSITY, collective="all_gather", **options),
        "gtopk tree": offbeat.GTopK(density=DENSITY, collective="tree", **options),
        "topk": offbeat.TopK(density=DENSITY, **options),
        "ef21": offbeat.EF21(density=DENSITY, **options),
    }


def over_sparse(**options: Any) -> dict[str, Any]:
    return {"spdkfac over topk": offbeat.SPDKFAC(exchange=offbeat.TopK(density=DENSITY, **options))}


STRATEGIES = sparse()
KFAC = over_sparse()
WITH_KFAC = ("plain SGD", "SGD", "Nesterov", "dampening", "subclass")
"""Optimizers that take a preconditioned gradient as it is. The others scale it once more, of which
K-FAC over a sparse exchange warns.
"""

UNCORRECTED = sparse(momentum_correction=None)
KFAC_UNCORRECTED = over_sparse(momentum_correction=None)
CORRECTED = ("SGD", "Nesterov", "AdamW")
"""Optimizers of which something works before entries are selected; of the others nothing does, and
they train the same model with correction and without.
"""

IN_SHORT = ("gtopk", "spdkfac over topk")
"""Strategies of the only cell that `make test` has."""


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # takes a second of each process that collects tests

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    return inputs[:1400], labels[:1400], inputs[1400:], labels[1400:]


def trained(
    rank: int, strategy: Any, optimizer: str, schedule: str, num_steps: int = STEPS
) -> tuple[torch.nn.Module, float]:
    """Returns the model, and the largest loss on the way."""
    inputs, labels, *_ = digits()
    torch.manual_seed(0)
    bias = optimizer != "Muon"  # which takes matrices only
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=bias), torch.nn.Tanh(), torch.nn.Linear(64, 10, bias=bias)
    )
    opt = OPTIMIZERS[optimizer](net)
    if isinstance(strategy, offbeat.EF21):
        for group in opt.param_groups:
            group["lr"] *= RATE_OF_EF21
    scheduler = SCHEDULES[schedule](opt)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    with offbeat.attach(net, opt, strategy):
        for step in range(num_steps):
            rows = torch.randint(len(inputs), (WORLD_SIZE, BATCH), generator=generator)[rank]
            loss = torch.nn.functional.cross_entropy(net(inputs[rows]), labels[rows])
            loss.backward()
            if schedule in CLIPS and CLIPS[schedule](step):
                torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            opt.step()
            opt.zero_grad()
            scheduler.step()
            worst = max(worst, loss.item()) if loss.isfinite() else math.inf
    return net, worst


def accuracy_of(net: torch.nn.Module) -> float:
    """In percent, on unseen digits."""
    *_, unseen, truth = digits()
    with torch.no_grad():
        return 100 * float((net(unseen).argmax(1) == truth).float().mean())


def by_strategy(
    rank: int, world_size: int, *, optimizer: str, schedule: str, only: Sequence[str] | None
) -> dict[str, tuple[float, float]]:
    """The accuracy and the largest loss with `AllReduce`, and with every sparse strategy, or `only`
    some.
    """
    strategies = {"allreduce": offbeat.AllReduce(), **STRATEGIES}
    uncorrected = dict(UNCORRECTED) if optimizer in CORRECTED else {}
    if optimizer in WITH_KFAC:
        strategies |= KFAC
        uncorrected |= KFAC_UNCORRECTED
    strategies |= {f"{name}, uncorrected": each for name, each in uncorrected.items()}
    if only is not None:
        strategies = {name: strategies[name] for name in ("allreduce", *only)}
    results = {}
    with warnings.catch_warnings():  # a loop that clips is told so
        warnings.filterwarnings("ignore", "gradients are changed between")
        for name, strategy in strategies.items():
            net, worst = trained(rank, strategy, optimizer, schedule)
            results[name] = accuracy_of(net), worst
    return results


def changed_by_correction(rank: int, world_size: int, *, optimizer: str) -> list[str]:
    """The strategies that train another model without correction."""
    pairs = {name: (STRATEGIES[name], UNCORRECTED[name]) for name in STRATEGIES}
    found = []
    for name, pair in pairs.items():
        models = [trained(rank, each, optimizer, "momentum set", 40)[0] for each in pair]
        weights, expected = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in models)
        if not torch.equal(weights, expected):
            found.append(name)
    return found


@pytest.mark.outside
@pytest.mark.ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_sparse_strategy_falls_behind_or_explodes(
    optimizer: str, schedule: str, run_ranks: RunRanks
) -> None:
    none_falls_behind_or_explodes(run_ranks, optimizer, schedule)


@pytest.mark.ranks
def test_some_sparse_strategies_neither_fall_behind_nor_explode(run_ranks: RunRanks) -> None:
    none_falls_behind_or_explodes(run_ranks, "subclass", "warm restarts", IN_SHORT)


def none_falls_behind_or_explodes(
    run_ranks: RunRanks, optimizer: str, schedule: str, only: Sequence[str] | None = None
) -> None:
    results = run_ranks(
        by_strategy, WORLD_SIZE, timeout_s=240, optimizer=optimizer, schedule=schedule, only=only
    )
    mean = {
        name: [sum(of_rank[name][i] for of_rank in results) / WORLD_SIZE for i in range(2)]
        for name in results[0]
    }
    accuracy, worst_loss = mean.pop("allreduce")
    assert accuracy > 90, "the task is too hard for this optimizer to tell anything"
    behind = {
        name: each
        for name, each in mean.items()
        if each[0] < accuracy - (MOST_POINTS_BELOW_OF_EF21 if "ef21" in name else MOST_POINTS_BELOW)
    }
    assert not behind, f"accuracy and worst loss; AllReduce has {accuracy}"
    exploded = {
        name: each
        for name, each in mean.items()
        if not each[1] <= MOST_TIMES_THE_WORST_LOSS * worst_loss
    }
    assert not exploded, f"accuracy and worst loss; AllReduce has {worst_loss}"


@pytest.mark.ranks
@pytest.mark.outside
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in CORRECTED])
def test_of_other_optimizers_nothing_is_corrected(optimizer: str, run_ranks: RunRanks) -> None:
    assert run_ranks(changed_by_correction, WORLD_SIZE, optimizer=optimizer) == [[], []]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in WITH_KFAC])
def test_kfac_over_a_sparse_exchange_warns_of_optimizers_that_scale(optimizer: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 10, bias=False))
    (strategy,) = KFAC.values()
    with (
        pytest.warns(match=f"{optimizer} scales anew what K-FAC makes"),
        offbeat.attach(net, OPTIMIZERS[optimizer](net), strategy),
    ):
        pass


def test_every_strategy_with_a_density_is_here() -> None:
    public = [getattr(offbeat, name) for name in offbeat.__all__]
    with_density = {
        kind
        for kind in public
        if dataclasses.is_dataclass(kind)
        and "density" in {field.name for field in dataclasses.fields(kind)}
    }
    with_density.remove(offbeat.DeMo)  # whose signs want an optimizer and a rate of their own
    assert {type(each) for each in STRATEGIES.values()} == with_density
