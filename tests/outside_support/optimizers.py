"""Every optimizer of PyTorch, with the options that PyTorch's own tests give it: where nothing is
left out of an exchange, the model is the one that a single process would train.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from outside_support.serial import Losses, Serial, relative_error

NUM_STEPS: Final = 8  # RAdam corrects its steps from the sixth on
TOLERANCE: Final = 1e-9

STRATEGIES: dict[str, Any] = {
    "allreduce": offbeat.AllReduce(),
    "gtopk, tree": offbeat.GTopK(density=1.0, collective="tree"),
    "gtopk, reduce_scatter": offbeat.GTopK(density=1.0, collective="reduce_scatter"),
    "gtopk, all_gather": offbeat.GTopK(density=1.0, collective="all_gather"),
    "topk": offbeat.TopK(density=1.0),
    "localsgd": offbeat.LocalSGD(period=1),
    "localsgd, local states": offbeat.LocalSGD(period=1, optimizer_state="local"),
    "spdkfac": offbeat.SPDKFAC(factor_interval=1, inverse_interval=2),
}

REFUSED: dict[tuple[str, str], str] = {
    **{("LBFGS", label): "runs several backward passes inside step" for label in STRATEGIES},
    **{
        ("SparseAdam", label): "takes sparse gradients only, and exchanged ones are dense"
        for label in STRATEGIES
        if label.startswith(("allreduce", "gtopk", "topk"))
    },
    ("SparseAdam", "spdkfac"): "its gradient is sparse",
}
"""By optimizer and strategy: the reason that is given."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An optimizer with options."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    name: str

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        parameters = list(net.parameters())
        if self.kind is torch.optim.Muon:  # takes matrices only
            parameters = [parameter for parameter in parameters if parameter.dim() == 2]
        return self.kind(parameters, **copy.deepcopy(self.options))

    def net(self) -> nn.Module:
        torch.manual_seed(1)
        if self.kind is torch.optim.SparseAdam:
            return nn.Embedding(12, 6, sparse=True).double()
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def input(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind is torch.optim.SparseAdam:
            return torch.randint(12, (5, 3), generator=generator)
        return torch.randn((5, 6), generator=generator).double()


def cases(*, whole: bool) -> Iterator[Case]:
    """As they come; `whole`: with each set of options and implementation that PyTorch tests."""
    # Takes seconds to import, and only ranks need it.
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        given = info.optim_inputs_func(device="cpu")
        for each in given if whole else given[:1]:
            for variant in ("", "foreach", "fused") if whole else ("",):
                if variant and variant not in info.supported_impls:
                    continue
                if variant == "fused" and "cpu" not in info.supports_fused_on:
                    continue
                name = ", ".join(filter(None, (info.optim_cls.__name__, each.desc, variant)))
                options = each.kwargs | ({variant: True} if variant else {})
                yield Case(kind=info.optim_cls, options=options, name=name)


def loss(inputs: torch.Tensor, net: nn.Module) -> torch.Tensor:
    return (net(inputs) - 1).square().mean()


def inputs_of(case: Case, step: int, world_size: int) -> list[torch.Tensor]:
    """Of each rank."""
    return [case.input(100 * step + rank) for rank in range(world_size)]


def losses_of(case: Case, step: int, world_size: int) -> Losses:
    return [partial(loss, inputs) for inputs in inputs_of(case, step, world_size)]


def train(
    net: nn.Module,
    case: Case,
    strategy: Any,
    inputs: Callable[[int], torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    optimizer = case.optimizer(net)
    with offbeat.attach(net, optimizer, strategy, group=group):
        for step in range(NUM_STEPS):
            loss(inputs(step), net).backward()
            optimizer.step()
            optimizer.zero_grad()


def strategy_of(case: Case, label: str) -> Any:
    """Second moments of Adam are plain means only where each state has an interval: else what they
    have gained is corrected, which `tests/averaging/test_state_intervals.py` holds against its
    formula.
    """
    if label == "localsgd" and case.kind in (torch.optim.Adam, torch.optim.AdamW):
        states = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(case.options.get("amsgrad"))
        return offbeat.LocalSGD(period=1, optimizer_state=dict.fromkeys(states, 1))
    return STRATEGIES[label]


def expected(case: Case, label: str, world_size: int) -> nn.Module:
    """With plain PyTorch in one process."""
    serial = Serial(case.net(), world_size, case.optimizer)
    for step in range(NUM_STEPS):
        losses = losses_of(case, step, world_size)
        if label.startswith("localsgd"):
            serial.step_apart(losses, averages_state=label == "localsgd")
        else:
            serial.step_together(losses)
    return serial.nets[0]


def error_of(case: Case, label: str, rank: int, world_size: int, alone: dist.ProcessGroup) -> float:
    strategy, net = strategy_of(case, label), case.net()
    train(net, case, strategy, lambda step: inputs_of(case, step, world_size)[rank])
    if label == "spdkfac":
        reference = case.net()
        train(
            reference,
            case,
            strategy,
            lambda step: torch.cat(inputs_of(case, step, world_size)),
            alone,
        )
    else:
        reference = expected(case, label, world_size)
    return relative_error(net, reference)


def failures(rank: int, world_size: int, *, labels: list[str], whole: bool) -> list[str]:
    """What is not as it should be, a line for each case. `whole`: as in `cases`, and each of them
    with every strategy; else an optimizer has two strategies, and a strategy many optimizers.
    """
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    found = []
    for number, case in enumerate(cases(whole=whole)):
        some = [labels[(number + each) % len(labels)] for each in (0, 3)]
        for label in labels if whole else some:
            reason = REFUSED.get((case.kind.__name__, label))
            try:
                error = error_of(case, label, rank, world_size, alone)
            except offbeat.OffbeatError as refusal:
                if reason is None or not re.search(reason, str(refusal)):
                    found.append(f"{label}, {case.name}: {type(refusal).__name__}: {refusal}")
                continue
            except Exception as problem:
                problem.add_note(f"in {label}, {case.name}")
                raise
            if reason is not None:
                found.append(f"{label}, {case.name}: should have been refused: {reason}")
            elif not error < TOLERANCE:
                found.append(f"{label}, {case.name}: is off by {error:.1g}")
    return found
