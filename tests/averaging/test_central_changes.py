"""CROSSBOW of which only encoded differences from the central model travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import ConfigError
from offbeat.strategies.registry import WEIGHT_CODECS
from thread_support.nets import make_model, parameters_of, step_of, trained
from thread_support.world import ThreadDriver, results_of, session_on

FEW = offbeat.WeightCodec(density=0.1, entries="reuse+float8")
EXACT = offbeat.WeightCodec(density=1.0, entries="float32")
CODECS = {name: name for name in WEIGHT_CODECS if name != "sparseloco"} | {"few changes": FEW}
Vectors = list[np.ndarray]


def sgd(model: torch.nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def rounds(num_ranks: int, codec: Any, num_steps: int) -> list[tuple[Vectors, Vectors]]:
    """By rank, after each of so many steps that learn nothing: what its model holds, and the
    central one.
    """

    def job(driver: ThreadDriver) -> tuple[Vectors, Vectors]:
        model = make_model()
        optimizer = sgd(model, lr=0.0)
        strategy = offbeat.Crossbow(alpha=0.3, codec=codec)
        with session_on(driver, model, optimizer, strategy) as session:
            draw = torch.Generator().manual_seed(driver.rank)
            own, central = [], []
            for step in range(num_steps):
                step_of(model, optimizer, driver.rank, step)
                if step == 0:  # the central model is the one that training begins with
                    with torch.no_grad():
                        for parameter in model.parameters():
                            noise = torch.randn(parameter.shape, generator=draw)
                            parameter += noise.to(parameter.dtype)
                state = session.state_dict()["callbacks"]["central_model"]["replicated"]
                z = [state[f"centre/{name}"].flatten() for name, _ in model.named_parameters()]
                own.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
                central.append(torch.cat(z).numpy().copy())
            return own, central

    return results_of(num_ranks, job)


@pytest.mark.parametrize(
    ("codec", "num_ranks"), [*((name, 3) for name in CODECS), *(("few changes", n) for n in (1, 5))]
)
def test_the_sum_of_all_models_stays_and_they_come_together(codec: str, num_ranks: int) -> None:
    held = rounds(num_ranks, CODECS[codec], 40)
    for own, central in held:
        assert all(map(np.array_equal, central, held[0][1])), "the central model is everyone's"
        assert not np.array_equal(own[0], own[-1])
    sums = [sum(own[step] for own, _ in held) + held[0][1][step] for step in range(len(held[0][0]))]
    for after in sums[1:]:
        np.testing.assert_allclose(after, sums[0], rtol=1e-9, atol=1e-9)
    apart = [
        sum(float(np.linalg.norm(own[step] - held[0][1][step])) for own, _ in held)
        for step in (0, -1)
    ]
    assert apart[1] < 0.4 * apart[0]


def test_what_is_written_in_full_moves_models_as_without_a_codec() -> None:
    for (own, central), (whole, centre) in zip(
        rounds(3, EXACT, 5), rounds(3, None, 5), strict=True
    ):
        np.testing.assert_allclose(own, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(central, centre, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["linear4", FEW])
def test_a_run_goes_on_from_a_saved_state(codec: Any) -> None:
    strategy = offbeat.Crossbow(period=2, codec=codec)
    resumed, straight = (
        trained(3, strategy, 9, optimizer_of=sgd, held=parameters_of, stop=stop)
        for stop in (4, None)
    )
    for mine, other in zip(resumed, straight, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("codec", ["sparseloco", offbeat.WeightCodec(density=0.1, decay=0.9)])
def test_codecs_that_forget_or_clip_are_refused(codec: Any) -> None:
    with pytest.raises(ConfigError, match="to what other ranks know; use a WeightCodec"):
        offbeat.Crossbow(codec=codec)
