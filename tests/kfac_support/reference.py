"""K-FAC in one process on the whole batch, from definitions: nothing is packed, fused or cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

import offbeat
from kfac_maths_support.reference import look

Batch = tuple[torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
"""A and G of a layer."""


def options(**hyper: Any) -> dict[str, Any]:
    """What a strategy takes for what `train` takes: those of its curvature in one object."""
    names = {field.name for field in fields(offbeat.Curvature)} & set(hyper)
    curvature = offbeat.Curvature(**{name: hyper.pop(name) for name in names})
    return {**hyper, "curvature": curvature}


def make_net(seed: int = 1) -> nn.Sequential:
    """A convolution and two linear layers, one without bias, in float64."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(27, 6, bias=False),
        nn.Tanh(),
        nn.Linear(6, 3),
    )
    return net.double()


def batch_of(rank: int, step: int, num_examples: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn((num_examples, 2, 3, 3), generator=generator, dtype=torch.float64)
    return x, torch.randn((num_examples, 3), generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, batch: Batch) -> torch.Tensor:
    return (net(batch[0]) - batch[1]).square().sum(dim=1).mean()


def together(batches: Sequence[Batch]) -> Batch:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def train(
    net: nn.Sequential,
    batches: Sequence[Batch],
    *,
    lr: float,
    damping: float,
    decay: float,
    kl_clip: float | None,
    pi: bool = True,
    factor_interval: int = 1,
    inverse_interval: int = 1,
    momentum: float = 0.0,
    grafting: str = "none",
) -> list[list[float]]:
    """One step for each batch. Returns for each how long each layer's preconditioned gradient was,
    before anything scaled it, over the plain one.
    """
    shares = []
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    places = [place for place, layer in enumerate(net) if isinstance(layer, nn.Linear | nn.Conv2d)]
    history: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {place: [] for place in places}
    directed: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
    for step, batch in enumerate(batches):
        if step % factor_interval == 0 or step < factor_interval:
            for place in places:
                history[place].append(_factors(net, place, batch))
        if step % inverse_interval == 0 or (step < inverse_interval and step in (1, 2, 4, 8, 16)):
            averages = {place: _averages(history[place], decay) for place in places}
            directed = {place: _damped_factors(averages[place], damping, pi=pi) for place in places}
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        gradients = {place: _gradient(net[place]) for place in places}
        preconditioned = {place: directed[place](gradients[place]) for place in places}
        change = sum(lr**2 * (preconditioned[place] * gradients[place]).sum() for place in places)
        nu = (
            1.0
            if kl_clip is None or grafting == "layer"
            else min(1.0, float((kl_clip / torch.as_tensor(change).abs()).sqrt()))
        )
        shares.append(
            [float(preconditioned[place].norm() / gradients[place].norm()) for place in places]
        )
        for place, share in zip(places, shares[-1], strict=True):
            wanted = {"none": share, "floor": max(share, 1.0), "layer": 1.0}[grafting]
            _set_gradient(net[place], nu * preconditioned[place] * (wanted / share))
        optimizer.step()
    return shares


def _factors(net: nn.Sequential, place: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    rest: Callable[[torch.Tensor], torch.Tensor] = net[place + 1 :]
    losses = lambda output: (rest(output) - batch[1]).square().sum(dim=1)  # noqa: E731
    inputs, outputs = look(net[place], net[:place](batch[0]).detach(), losses).factors()
    return inputs[0], outputs[0]


def _averages(history: Sequence[Pair], decay: float) -> Pair:
    weights = [decay**age for age in reversed(range(len(history)))]
    a, g = (
        sum(w * pair[side] for w, pair in zip(weights, history, strict=True)) / sum(weights)
        for side in (0, 1)
    )
    return torch.as_tensor(a), torch.as_tensor(g)


def _damped_factors(
    averages: Pair, damping: float, *, pi: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    a, g = averages
    of_a = of_g = torch.as_tensor(damping, dtype=a.dtype)
    if pi:
        ratio = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        of_a, of_g = damping**0.5 * ratio, damping**0.5 / ratio
    left, right = torch.linalg.inv(_damped(g, of_g)), torch.linalg.inv(_damped(a, of_a))
    return lambda gradient: left @ gradient @ right


def _damped(matrix: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)


def _gradient(layer: nn.Module) -> torch.Tensor:
    weight = layer.get_parameter("weight").grad
    assert weight is not None
    matrix = weight.permute(0, 2, 3, 1).flatten(1) if weight.ndim == 4 else weight
    bias = getattr(layer, "bias", None)
    return matrix if bias is None else torch.cat([matrix, bias.grad[:, None]], dim=1)


def _set_gradient(layer: nn.Module, matrix: torch.Tensor) -> None:
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    if bias is not None:
        bias.grad, matrix = matrix[:, -1].clone(), matrix[:, :-1]
    if weight.ndim == 4:
        matrix = matrix.unflatten(1, (*weight.shape[2:], weight.shape[1])).permute(0, 3, 1, 2)
    weight.grad = matrix.clone()
