"""Averages over steps, free of damping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError
from offbeat.kfac.averages import RunningFactor, damping_of
from offbeat.kfac.blocks import FactorShape
from offbeat.kfac.symmetric import pack

SHAPE = FactorShape(groups=2, dim=3)


def running() -> RunningFactor:
    return RunningFactor(SHAPE, dtype=torch.float64, device=torch.device("cpu"))


def increment(seed: int) -> torch.Tensor:
    return torch.rand(
        SHAPE.packed, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@given(st.lists(st.sampled_from(["good", "nan", "inf", "nobody"]), max_size=8), st.floats(0, 0.99))
def test_the_average_is_the_weighted_mean_of_what_was_good(steps: list[str], decay: float) -> None:
    factor, good = running(), []
    for seed, kind in enumerate(steps):
        new = increment(seed)
        if kind in ("nan", "inf"):
            new[0, 2] = float(kind)
        if kind == "good":
            good.append(new)
        factor.update_(new, weight=0.0 if kind == "nobody" else torch.tensor(5.0), decay=decay)
    weights = [(1 - decay) * decay ** (len(good) - 1 - position) for position in range(len(good))]
    expected = sum(
        (w * each for w, each in zip(weights, good, strict=True)), torch.zeros(SHAPE.packed)
    )
    if good:
        torch.testing.assert_close(factor.average(), expected / sum(weights))
    else:
        assert factor.mass == 0
        assert not factor.average().any()


def test_state_goes_round() -> None:
    first, second = running(), running()
    first.update_(increment(0), weight=1, decay=0.5)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    for factor in (first, second):
        factor.update_(increment(1), weight=1, decay=0.5)
    assert torch.equal(first.average(), second.average())
    with pytest.raises(CheckpointError, match="same model"):
        RunningFactor(
            FactorShape(groups=1, dim=2), dtype=torch.float64, device=torch.device("cpu")
        ).load_state_dict(first.state_dict())


def test_packed_state_is_at_most_half_of_the_square_and_a_bit() -> None:
    shape = FactorShape(groups=4, dim=100)
    assert shape.num_elements == 4 * 100 * 101 / 2
    assert FactorShape(groups=1, dim=100, is_diagonal=True).num_elements == 100


def test_damping_is_shared_in_proportion_to_the_factors() -> None:
    a, g = torch.eye(4)[None] * 9, torch.eye(2)[None] * 0.25
    shapes = FactorShape(groups=1, dim=4), FactorShape(groups=1, dim=2)
    averages = (pack(a), shapes[0]), (pack(g), shapes[1])
    plain = damping_of(*averages, damping=0.04, pi=False)
    assert [float(value) for value in plain] == pytest.approx([0.04, 0.04])
    shared = damping_of(*averages, damping=0.04, pi=True)
    assert float(shared[0] * shared[1]) == pytest.approx(0.04)
    assert float(shared[0] / shared[1]) == pytest.approx(9 / 0.25)
    diagonal = FactorShape(groups=1, dim=4, is_diagonal=True)
    assert (
        damping_of((torch.full((1, 4), 9.0), diagonal), averages[1], damping=0.04, pi=True)
        == shared
    )


def test_without_a_trace_nothing_is_shared() -> None:
    nothing = torch.zeros(1, 3), FactorShape(groups=1, dim=2)
    something = torch.ones(1, 3), FactorShape(groups=1, dim=2)
    for pair in ((nothing, something), (something, nothing), (nothing, nothing)):
        assert [
            float(value) for value in damping_of(*pair, damping=0.09, pi=True)
        ] == pytest.approx([0.3, 0.3])
    assert math.isclose(
        float(damping_of(something, something, damping=0.09, pi=True)[0]), 0.3, rel_tol=1e-6
    )
