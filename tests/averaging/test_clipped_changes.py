"""Changes of weights that are clipped to the median norm of all ranks, against SparseLoCo's steps
in one process.
"""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError
from thread_support.nets import make_model, step_of, trained

PERIOD, DENSITY, DECAY, OUTER_LR = 2, 0.25, 0.9, 0.6
STRATEGY = offbeat.LocalSGD(
    period=PERIOD,
    codec=offbeat.WeightCodec(density=DENSITY, decay=DECAY, clip_to_median=True),
    outer=offbeat.Outer(lr=OUTER_LR, momentum=0.0, nesterov=False),
)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def model_of(rank: int) -> torch.nn.Module:
    """Ranks from the third one on move much further than the others."""
    model = make_model()
    if rank > 1:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 5 * gradient)
    return model


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def run(num_ranks: int, num_steps: int, stop: int | None = None) -> list[torch.Tensor]:
    return trained(
        num_ranks,
        STRATEGY,
        num_steps,
        model_of=model_of,
        optimizer_of=sgd,
        held=flat,
        stop=stop,
    )


def reference(num_ranks: int, num_steps: int) -> torch.Tensor:
    """The anchor in the end."""
    models = [model_of(rank) for rank in range(num_ranks)]
    optimizers = [sgd(model) for model in models]
    anchor = flat(models[0])
    owed = [torch.zeros_like(anchor) for _ in models]
    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step - 1)
        if step % PERIOD:
            continue
        sent = []
        for rank, model in enumerate(models):
            change = flat(model) - anchor + owed[rank]
            message = torch.zeros_like(change)
            places = change.abs().topk(round(DENSITY * change.numel())).indices
            message[places] = change[places]
            owed[rank] = DECAY * (change - message)
            sent.append(message)
        norms = torch.stack([message.norm() for message in sent])
        median = norms.quantile(0.5)
        clipped = [m * min(1.0, float(median / n)) for m, n in zip(sent, norms, strict=True)]
        anchor = anchor + OUTER_LR * sum(clipped) / num_ranks
        for model in models:
            torch.nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return anchor


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_models_are_those_of_the_paper(num_ranks: int) -> None:
    found = run(num_ranks, 8)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], reference(num_ranks, 8), rtol=1e-9, atol=1e-9)


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped() -> None:
    assert torch.equal(run(3, 9, stop=5)[0], run(3, 9)[0])


def test_sparseloco_clips() -> None:
    codec = offbeat.LocalSGD(codec="sparseloco").weight_codec
    assert codec is not None
    assert codec.clip_to_median
    with pytest.raises(ConfigError, match="clip_to_median needs a density below 1"):
        offbeat.WeightCodec(density=1.0, clip_to_median=True)
