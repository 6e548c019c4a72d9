"""Gradients of single examples, and other transforms of `torch.func`, beside an attached model's
training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import offbeat
from offbeat.errors import UnsupportedError
from offbeat.strategies.base import Strategy

# What torch.func imports is scripted.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

X, Y = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4

Weights = dict[str, torch.Tensor]


class Attending(nn.Module):
    """Layers that are watched by hooks, and an attention, which is watched from inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(self.attention(x, x, x)[0].mean(1))  # type: ignore[no-any-return]


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(weights: Weights, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])


def of_each_example(model: nn.Module) -> Any:
    return vmap(grad(loss_of), in_dims=(None, None, 0, 0))(weights_of(model), model, X, Y)


def jacobian(model: nn.Module) -> Any:
    return jacrev(lambda weights: functional_call(model, weights, (X,)))(weights_of(model))


def directional(model: nn.Module) -> Any:
    weights = weights_of(model)
    return jvp(lambda some: functional_call(model, some, (X,)), (weights,), (weights,))


def second(model: nn.Module) -> Any:
    return hessian(lambda x: model(x[None]).square().sum())(X[0])


TRANSFORMS = [of_each_example, jacobian, directional, second]


def train(model: nn.Module, strategy: Strategy, look: Callable[[nn.Module], Any]) -> list[Any]:
    """What `look` finds after each of three steps, while the gradients are still there."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(3):
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            found.append(look(model))
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("look", TRANSFORMS)
@pytest.mark.parametrize("strategy", [offbeat.AllReduce(), offbeat.SPDKFAC(), offbeat.WAGMA()])
def test_transforms_find_what_they_find_in_a_model_alone_and_training_goes_on(
    look: Callable[[nn.Module], Any], strategy: Strategy
) -> None:
    torch.manual_seed(1)
    model = Attending()
    other = copy.deepcopy(model)
    found = train(model, strategy, look)
    expected = train(other, strategy, lambda model: look(copy.deepcopy(model)))
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_loss_of_a_mapped_model_is_trained_and_kfac_says_why_it_sees_nothing() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = X[:, 0]
    with offbeat.attach(model, optimizer, offbeat.AllReduce()):
        expected = torch.autograd.grad(F.cross_entropy(model(x), Y), list(model.parameters()))
        F.cross_entropy(vmap(model)(x), Y).backward()
        optimizer.step()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
        optimizer.zero_grad()
    with offbeat.attach(model, optimizer, offbeat.SPDKFAC()):
        F.cross_entropy(vmap(model)(x), Y).backward()
        with pytest.raises(UnsupportedError, match=r"inside a transform of torch\.func"):
            optimizer.step()
