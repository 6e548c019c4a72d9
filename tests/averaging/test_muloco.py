"""MuLoCo: Muon for a rank's own steps, and an outer optimizer with Nesterov's momentum (arXiv
2505.23725), against the same in one process.
"""

from __future__ import annotations

import pytest
import torch

import offbeat
from thread_support.nets import parameters_of, step_of, trained

RANKS, PERIOD = 3, 3
OUTER = offbeat.Outer(lr=0.7, momentum=0.6)
STRATEGY = offbeat.LocalSGD(period=PERIOD, outer=OUTER)


def make_model() -> torch.nn.Module:
    """Muon is for matrices."""
    shapes = [(4, 6), (6, 5), (5, 1)]
    layers = [torch.nn.Linear(*shape, bias=False, dtype=torch.float64) for shape in shapes]
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw) / 2)
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:])


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.03)


def run(num_steps: int, stop: int | None = None) -> list[list[torch.Tensor]]:
    return trained(
        RANKS,
        STRATEGY,
        num_steps,
        model_of=lambda rank: make_model(),
        optimizer_of=muon,
        held=parameters_of,
        stop=stop,
    )


@pytest.fixture(scope="module")
def straight() -> list[list[torch.Tensor]]:
    return run(11)


def test_models_are_those_of_the_paper(straight: list[list[torch.Tensor]]) -> None:
    """u = mu u + eta change; weights = anchor - mu u - eta change, with the change from the mean to
    the anchor.
    """
    models = [make_model() for _ in range(RANKS)]
    optimizers = [muon(model) for model in models]
    anchors = [parameter.detach().clone() for parameter in models[0].parameters()]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    for step in range(11):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step)
        if (step + 1) % PERIOD:
            continue
        everywhere = zip(*(model.parameters() for model in models), strict=True)
        for anchor, momentum, parameters in zip(anchors, momenta, everywhere, strict=True):
            change = anchor - torch.stack([each.detach() for each in parameters]).mean(0)
            momentum.mul_(OUTER.momentum).add_(change, alpha=OUTER.lr)
            anchor.sub_(OUTER.momentum * momentum + OUTER.lr * change)
            for parameter in parameters:
                parameter.detach().copy_(anchor)
    expected = [[parameter.detach() for parameter in model.parameters()] for model in models]
    # Muon computes in bfloat16, whose last bit is 6e-5 of a step.
    torch.testing.assert_close(straight, expected, rtol=0, atol=2e-4)


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    straight: list[list[torch.Tensor]],
) -> None:
    for mine, resumed in zip(straight, run(11, stop=5), strict=True):
        assert all(map(torch.equal, mine, resumed))
