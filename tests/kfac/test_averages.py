"""Averages over steps, free of damping."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac.callback import RunningFactor, damping_of, mean_eigenvalue
from offbeat.kfac.factors import FactorShape, pack

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


def test_packed_state_is_at_most_half_of_the_square_and_a_bit() -> None:
    shape = FactorShape(groups=4, dim=100)
    assert shape.num_elements == 4 * 100 * 101 / 2
    assert FactorShape(groups=1, dim=100, is_diagonal=True).num_elements == 100


def test_damping_is_shared_in_proportion_to_the_factors() -> None:
    a, g = torch.tensor(9.0), torch.tensor(0.25)
    plain = damping_of(a, g, damping=0.04, pi=False)
    assert [float(value) for value in plain] == pytest.approx([0.04, 0.04])
    shared = damping_of(a, g, damping=0.04, pi=True)
    assert float(shared[0] * shared[1]) == pytest.approx(0.04)
    assert float(shared[0] / shared[1]) == pytest.approx(9 / 0.25)


def test_the_released_scaling_of_convolutions_matters_without_pi_alone() -> None:
    """SPD-KFAC's code has A / S and G S for our A and G: how much of each is damping?"""
    a, g, positions = torch.tensor(9.0), torch.tensor(0.25), 64
    for pi, times in ((True, 1), (False, positions)):
        ours = damping_of(a, g, damping=0.04, pi=pi)
        released = damping_of(a / positions, g * positions, damping=0.04, pi=pi)
        assert float(released[0] / (a / positions)) == pytest.approx(float(times * ours[0] / a))
        assert float(released[1] / (g * positions)) == pytest.approx(float(ours[1] / g / times))


def test_without_a_trace_nothing_is_shared() -> None:
    for pair in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        a, g = map(torch.tensor, pair)
        found = [float(value) for value in damping_of(a, g, damping=0.09, pi=True)]
        assert found == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(
    ("matrices", "shape"),
    [
        (9 * torch.eye(4)[None], FactorShape(groups=1, dim=4)),
        (
            torch.diag_embed(torch.tensor([[9.0, 9.0], [9.0, 0.0]])),
            FactorShape(groups=2, dim=2, padding=1),
        ),
    ],
)
def test_rows_that_stand_for_nothing_have_no_eigenvalues(
    matrices: torch.Tensor, shape: FactorShape
) -> None:
    assert float(mean_eigenvalue(pack(matrices), shape)) == 9
    factor = RunningFactor(shape, dtype=torch.float32, device=torch.device("cpu"))
    factor.update_(pack(matrices), weight=1.0, decay=0.5)
    assert float(factor.mean_eigenvalue()) == 9
