"""What training loops do, for comparisons with papers: groups with rates, momenta and decays of
their own, a schedule, a layer that in some steps one rank uses or none does, and a run that ends
and goes on, with as many ranks or with others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

import offbeat
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on

NUM_STEPS, STOP = 14, 7
FACTORS = (0.25, 0.5, 1, 1, 1, 0.3, 0.3, 0.1, 0.1, 1, 1, 0.5, 0.5, 0.2)
"""By step, what learning rates are multiplied by: they rise, fall, and rise again."""

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class BranchedNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = torch.nn.Linear(4, 6), torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 1)
        self.double()
        draw = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2

    @override
    def forward(self, x: torch.Tensor, *, uses_branch: bool) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if uses_branch:
            hidden = hidden + self.branch(hidden).tanh()
        found: torch.Tensor = self.last(hidden)
        return found

    def groups(self, rate: float, of_last: Mapping[str, Any]) -> list[dict[str, Any]]:
        first = [*self.first.parameters(), *self.branch.parameters()]
        last = {"params": [*self.last.parameters()], "lr": rate / 3, **of_last}
        return [{"params": first, "lr": rate, "weight_decay": 0.02}, last]


OPTIMIZERS: dict[str, Callable[[BranchedNet], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.groups(0.05, {"momentum": 0.5}), momentum=0.9),
    "Nesterov": lambda net: torch.optim.SGD(net.groups(0.05, {}), momentum=0.9, nesterov=True),
    "Adam": lambda net: torch.optim.Adam(net.groups(0.02, {"betas": (0.8, 0.9)})),
    "AdamW": lambda net: torch.optim.AdamW(net.groups(0.02, {"betas": (0.8, 0.9)})),
}


def backward(
    net: BranchedNet, optimizer: torch.optim.Optimizer, rank: int, step: int
) -> torch.optim.Optimizer:
    """Set the learning rates of a step, and compute a rank's gradients in it."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * FACTORS[step]
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    uses_branch = {1: False, 2: rank == 0}.get(step % 4, True)
    optimizer.zero_grad()
    (net(x, uses_branch=uses_branch) - x.sum(1, keepdim=True).sin()).square().mean().backward()
    return optimizer


def vector_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def trained(strategy: Strategy, kind: str, num_ranks: int, then: int) -> torch.Tensor:
    """What `then` ranks hold in the end, who go on at `STOP` where `num_ranks` have ended: where
    they are others, from the averaged model.
    """

    def go_on(driver: ThreadDriver, steps: range, states: Sequence[Any]) -> tuple[Any, ...]:
        net = BranchedNet()
        optimizer = OPTIMIZERS[kind](net)
        with session_on(driver, net, optimizer, strategy) as session:
            if states:
                whole, own, of_optimizer, _ = copy.deepcopy(states[driver.rank % len(states)])
                net.load_state_dict(own if len(states) == driver.world_size else whole)
                optimizer.load_state_dict(of_optimizer)
                of_sessions = [each[3] for each in states]
                session.load_state_dict(
                    offbeat.reshard(of_sessions, driver.world_size, driver.rank)
                )
            for step in steps:
                backward(net, optimizer, driver.rank, step).step()
            parts = [net.state_dict(), optimizer.state_dict(), session.state_dict()]
            return (*copy.deepcopy((session.averaged_state_dict(), *parts)), vector_of(net))

    first = results_of(num_ranks, lambda driver: go_on(driver, range(STOP), []))
    states = [each[:4] for each in first]
    rest = results_of(then, lambda driver: go_on(driver, range(STOP, NUM_STEPS), states))
    return torch.stack([each[4] for each in rest])


class SimulatedRanks:
    """The same ranks one after the other, with nothing of offbeat's.

    Args:
        kind: of their optimizers.
        num_ranks: how many.
    """

    def __init__(self, kind: str, num_ranks: int) -> None:
        self._kind = kind
        self.nets = [BranchedNet() for _ in range(num_ranks)]
        self.optimizers = [OPTIMIZERS[kind](net) for net in self.nets]

    def __len__(self) -> int:
        return len(self.nets)

    @property
    def x(self) -> torch.Tensor:
        """What each of them holds: a copy, shape (ranks, elements)."""
        return torch.stack([vector_of(net) for net in self.nets])

    @x.setter
    def x(self, values: torch.Tensor) -> None:
        for net, vector in zip(self.nets, values, strict=True):
            torch.nn.utils.vector_to_parameters(vector.clone(), net.parameters())

    def backward(self, step: int) -> list[list[torch.Tensor | None]]:
        """The gradients of each rank."""
        for rank, (net, optimizer) in enumerate(zip(self.nets, self.optimizers, strict=True)):
            backward(net, optimizer, rank, step)
        return [[parameter.grad for parameter in net.parameters()] for net in self.nets]

    def step_apart(self, step: int) -> None:
        """Each rank's own step."""
        self.backward(step)
        for optimizer in self.optimizers:
            optimizer.step()

    def step_with(self, rank: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The optimizer's step of a rank with gradients that it is given."""
        for parameter, gradient in zip(self.nets[rank].parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizers[rank].step()

    def restart(self, num_ranks: int) -> None:
        """Go on with so many ranks, from the mean of all models where they are others."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        x = self.x
        if num_ranks != len(self):
            x = x.mean(0).expand(num_ranks, -1)
        self.nets = [BranchedNet() for _ in range(num_ranks)]
        self.optimizers = [OPTIMIZERS[self._kind](net) for net in self.nets]
        for rank, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(copy.deepcopy(states[rank % len(states)]))
        self.x = x
