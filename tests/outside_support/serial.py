"""All ranks in one process, with nothing of offbeat's: what the oracles compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Losses = Sequence[Callable[[nn.Module], torch.Tensor]]
"""Of one step: what each rank's loss is."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Serial:
    """A copy of a model and an optimizer for each rank.

    Args:
        net: the model that all ranks begin with.
        world_size: number of ranks, >= 1.
        make: builds the optimizer of a copy.
    """

    def __init__(self, net: nn.Module, world_size: int, make: MakeOptimizer) -> None:
        self.nets = [copy.deepcopy(net) for _ in range(world_size)]
        self.optimizers = [make(copied) for copied in self.nets]

    def gradients(self, losses: Losses) -> list[torch.Tensor | None]:
        """The mean of the ranks' gradients, for each parameter; None where no rank has one."""
        self._backward(losses)
        return [mean_gradient(copies) for copies in self._parameters()]

    def step_together(self, losses: Losses) -> None:
        """A step by the mean of the ranks' gradients."""
        for mean, copies in zip(self.gradients(losses), self._parameters(), strict=True):
            for parameter in copies:
                parameter.grad = None if mean is None else mean.clone()
        self._step()

    def step_apart(self, losses: Losses, *, averages_state: bool) -> None:
        """Each rank's own step, and then the mean of all models, and of all states or of none."""
        self._backward(losses)
        self._step()
        for copies in self._parameters():
            average_([parameter.detach() for parameter in copies])
            if averages_state:
                average_states_([o.state[p] for o, p in zip(self.optimizers, copies, strict=True)])

    def _backward(self, losses: Losses) -> None:
        for net, loss in zip(self.nets, losses, strict=True):
            net.zero_grad()
            loss(net).backward()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _parameters(self) -> list[tuple[nn.Parameter, ...]]:
        return list(zip(*(net.parameters() for net in self.nets), strict=True))


def mean_gradient(copies: Sequence[nn.Parameter]) -> torch.Tensor | None:
    found = [parameter.grad for parameter in copies if parameter.grad is not None]
    if not found:
        return None
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]
    return torch.stack(dense).sum(dim=0) / len(copies)


def average_(tensors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(tuple(tensors)).mean(dim=0)
    for tensor in tensors:
        tensor.copy_(mean)


def average_states_(states: Sequence[dict[str, Any]]) -> None:
    """Replace every entry by its mean over the ranks, whatever its shape."""
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor):
            average_([state[key] for state in states])
        elif value is not None:
            mean = sum(state[key] for state in states) / len(states)
            for state in states:
                state[key] = mean


def relative_error(net: nn.Module, expected: nn.Module) -> float:
    """The largest difference between the parameters, as a part of the largest parameter."""
    found, right = vector(net), vector(expected)
    error = float((found - right).abs().max() / right.abs().max())
    return error if found.isfinite().all() else float("inf")


def vector(net: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach()
