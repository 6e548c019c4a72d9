"""D-PSGD and SGP of which only encoded changes travel, beside implementations for all at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import offbeat
from offbeat import reshard
from offbeat.arithmetic.topologies import exponential_peers, ring_weights
from offbeat.codec.few_bits import LinearValues
from offbeat.errors import ConfigError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.registry import WEIGHT_CODECS
from thread_support.nets import make_model, parameters_of, step_of, trained
from thread_support.world import ThreadDriver, results_of, session_on

FEW = offbeat.WeightCodec(density=0.1, entries="reuse+float8")
CODECS = {name: name for name in WEIGHT_CODECS if name != "sparseloco"} | {"few changes": FEW}
Vectors = list[np.ndarray]
Kind: TypeAlias = type[offbeat.DPSGD] | type[offbeat.SGP]


def sgd(model: torch.nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def vector_of(model: torch.nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def part(model: torch.nn.Module, rank: int) -> None:
    """As other models than those of the other ranks."""
    draw = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=draw, dtype=torch.float64)


def rounds(num_ranks: int, strategy: AveragingStrategy, num_steps: int) -> list[Vectors]:
    """By rank, what models hold before and after each of so many steps that learn nothing."""

    def job(driver: ThreadDriver) -> Vectors:
        model = make_model()
        optimizer = sgd(model, lr=0.0)
        with session_on(driver, model, optimizer, strategy):
            part(model, driver.rank)
            held = [vector_of(model)]
            for step in range(num_steps):
                step_of(model, optimizer, driver.rank, step)
                held.append(vector_of(model))
            return held

    return results_of(num_ranks, job)


WORLD_SIZES = (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("codec", "num_ranks"),
    [
        (codec, WORLD_SIZES[(number + more) % 4])
        for number, codec in enumerate(CODECS)
        for more in (0, 2)
    ],
)
@pytest.mark.parametrize("kind", [offbeat.DPSGD, offbeat.SGP])
def test_an_exchange_does_not_change_the_mean(kind: Kind, num_ranks: int, codec: str) -> None:
    held = np.array(rounds(num_ranks, kind(codec=CODECS[codec]), 6))
    means = held.mean(axis=0)
    np.testing.assert_allclose(means, np.broadcast_to(means[0], means.shape), atol=1e-14)
    moved = np.abs(held[:, 1:] - held[:, :-1]).max(axis=(0, 2))
    assert (moved > 0).all() == (num_ranks > 1)


def spreads(num_ranks: int, strategy: AveragingStrategy, num_steps: int) -> np.ndarray:
    held = np.array(rounds(num_ranks, strategy, num_steps))
    return np.linalg.norm(held - held.mean(axis=0), axis=(0, 2))


@pytest.mark.parametrize(
    ("num_ranks", "codec", "num_steps", "ratio"),
    [(2, "linear4", 60, 1e-6), (5, FEW, 120, 0.02), (5, "sign", 60, 0.5)],
)
@pytest.mark.parametrize("kind", [offbeat.DPSGD, offbeat.SGP])
def test_ranks_come_together(
    kind: Kind, num_ranks: int, codec: Any, num_steps: int, ratio: float
) -> None:
    found = spreads(num_ranks, kind(codec=codec), num_steps)
    assert found[-1] < ratio * found[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("codec", "encoded"),
    [
        ("linear4", lambda change: coded(LinearValues(4), change)),
        (offbeat.WeightCodec(density=0.1), lambda change: largest(change, 0.1)),
    ],
)
def test_models_are_those_of_choco_sgd(
    num_ranks: int, codec: Any, encoded: Callable[[np.ndarray], np.ndarray]
) -> None:
    found = trained(
        num_ranks, offbeat.DPSGD(codec=codec), 7, optimizer_of=sgd, held=lambda m, _: vector_of(m)
    )
    gamma = 1.0 if codec == "linear4" else math.sqrt(0.1) / 2
    models = [make_model() for _ in range(num_ranks)]
    known: Vectors = []
    for step in range(7):
        begun = [vector_of(model) for model in models]
        known = [k + encoded(x - k) for k, x in zip(known, begun, strict=True)] if known else begun
        for rank, model in enumerate(models):
            step_of(model, sgd(model), rank, step)
            row = ring_weights(rank, num_ranks)
            change = sum(weight * (known[peer] - known[rank]) for peer, weight in row.items())
            moved = torch.from_numpy(vector_of(model) + gamma * change)
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
    expected = [vector_of(model) for model in models]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def coded(values: LinearValues, change: np.ndarray) -> np.ndarray:
    return values.decode(values.encode(change).view(np.uint8), change.size).astype(np.float64)


def largest(change: np.ndarray, density: float) -> np.ndarray:
    """Its largest entries as they travel, in float64."""
    sent = np.zeros_like(change)
    places = np.argsort(-np.abs(change), kind="stable")[: round(density * change.size)]
    sent[places] = change[places]
    return sent


def states(
    num_ranks: int, codec: Any, num_steps: int = 4, kind: Kind = offbeat.DPSGD
) -> list[dict[str, Any]]:
    def job(driver: ThreadDriver) -> dict[str, Any]:
        model = make_model()
        optimizer = sgd(model)
        with session_on(driver, model, optimizer, kind(codec=codec)) as session:
            for step in range(num_steps):
                step_of(model, optimizer, driver.rank, step)
            return session.state_dict()

    return results_of(num_ranks, job)


@pytest.mark.parametrize("codec", ["e3m0", "sign", FEW])
def test_a_rank_and_its_neighbours_hold_the_same_bits_of_it(codec: Any) -> None:
    held = [state["callbacks"]["neighbour_average"]["local"] for state in states(4, codec)]
    seen = 0
    for mine in held:
        for key, value in mine.items():
            if key.startswith("known/"):
                owner = held[int(key.split("/")[1])]
                assert torch.equal(value, owner[key])
                seen += 1
    assert seen == 4 * 3 * 6  # three vectors of six parameters on each rank


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("out_degree", [1, 2])
def test_pushed_changes_are_those_of_links_of_their_own(num_ranks: int, out_degree: int) -> None:
    if out_degree >= num_ranks:
        return
    strategy = offbeat.SGP(out_degree=out_degree, codec=offbeat.WeightCodec(density=0.1))
    found = rounds(num_ranks, strategy, 7)
    models = [held[0] for held in found]
    known: dict[tuple[int, int], np.ndarray] = {}
    gamma, share = math.sqrt(0.1) / 2, 1 / (1 + out_degree)
    for number in range(7):
        links = [
            (rank, peer)
            for rank in range(num_ranks)
            for peer in exponential_peers(
                rank, num_ranks, round_number=number, out_degree=out_degree
            ).targets
        ]
        for rank, peer in links:
            before, x = known.get((rank, peer)), models[rank]
            known[rank, peer] = x if before is None else before + largest(x - before, 0.1)
        models = [
            x
            + gamma * share * sum(known[link] for link in links if link[1] == rank)
            - gamma * share * sum(known[link] for link in links if link[0] == rank)
            for rank, x in enumerate(models)
        ]
        for rank, x in enumerate(models):
            np.testing.assert_allclose(found[rank][number + 1], x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("codec", ["linear4", FEW])
@pytest.mark.parametrize("kind", [offbeat.DPSGD, offbeat.SGP])
def test_a_run_goes_on_from_a_saved_state(kind: Kind, codec: Any) -> None:
    resumed, straight = (
        trained(3, kind(codec=codec), 9, optimizer_of=sgd, held=parameters_of, stop=stop)
        for stop in (4, None)
    )
    for mine, other in zip(resumed, straight, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("kind", [offbeat.DPSGD, offbeat.SGP])
def test_in_another_world_the_first_exchange_is_exact(kind: Kind) -> None:
    saved = states(3, "sign", kind=kind)

    def job(driver: ThreadDriver) -> Vectors:
        model = make_model()
        optimizer = sgd(model, lr=0.0)
        with session_on(driver, model, optimizer, kind(codec="sign")) as session:
            part(model, driver.rank)
            session.load_state_dict(reshard(saved, 2, driver.rank))
            before = vector_of(model)
            step_of(model, optimizer, driver.rank, 0)
            return [before, vector_of(model)]

    (one, after), (other, after_too) = results_of(2, job)
    quarter = (other - one) / 4  # half of the way, in steps of a half
    np.testing.assert_allclose(after, one + quarter, rtol=1e-12)
    np.testing.assert_allclose(after_too, other - quarter, rtol=1e-12)


@pytest.mark.parametrize("codec", ["sparseloco", offbeat.WeightCodec(density=0.1, decay=0.9)])
@pytest.mark.parametrize("kind", [offbeat.DPSGD, offbeat.SGP])
def test_codecs_that_forget_or_need_all_ranks_are_refused(kind: Kind, codec: Any) -> None:
    with pytest.raises(ConfigError, match="to what other ranks know; use a WeightCodec"):
        kind(codec=codec)


def test_a_codec_is_named_right() -> None:
    with pytest.raises(ConfigError, match="did you mean 'linear8'"):
        offbeat.DPSGD(codec="linear")
