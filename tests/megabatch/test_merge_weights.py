"""Merge weights are a mean's, and what the published ones do to the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import WireError
from offbeat.megabatch.batch_sizes import merge_weights, normalised, perturbed
from offbeat.megabatch.merge_momentum import MergeMomentum, with_momentum

workers = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=8
).filter(lambda drawn: any(made for made, _ in drawn))
weights = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(normalised)


@given(workers)
def test_weights_sum_to_one_and_who_did_nothing_has_none(drawn: list[tuple[int, int]]) -> None:
    updates, sizes = [made for made, _ in drawn], [size for _, size in drawn]
    found = merge_weights(updates, sizes)
    assert sum(found) == pytest.approx(1.0)
    assert all(weight == 0.0 for weight, made in zip(found, updates, strict=True) if not made)


@given(workers)
def test_equal_updates_make_the_weights_those_of_samples(drawn: list[tuple[int, int]]) -> None:
    sizes = [size for _, size in drawn]
    assert merge_weights([7] * len(sizes), sizes) == pytest.approx(
        normalised([7 * size for size in sizes])
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(2, 100)), min_size=1, max_size=8), st.data()
)
def test_a_remnant_counts_by_its_samples(drawn: list[tuple[int, int]], data: st.DataObject) -> None:
    """One more update, with less than half a batch, changes weights by no more than its samples."""
    updates, sizes = [made for made, _ in drawn], [size for _, size in drawn]
    counted = [float(made) for made in updates]
    worker = data.draw(st.integers(0, len(drawn) - 1))
    counted[worker] += data.draw(st.floats(0, 0.499))
    without, found = merge_weights(updates, sizes), merge_weights(counted, sizes)
    assert found == pytest.approx(without, abs=0.5 / min(updates))
    assert found[worker] >= without[worker] - 1e-12


@given(weights)
def test_perturbed_weights_are_still_a_means(weights: tuple[float, ...]) -> None:
    found = perturbed(weights, [0.0] * len(weights))
    assert sum(found) == pytest.approx(1.0)
    assert all(weight >= 0 for weight in found)
    assert found.index(max(found)) == weights.index(max(weights))


def test_large_replicas_and_equal_weights_are_left_alone() -> None:
    assert perturbed([0.6, 0.4], [0.05, 0.2]) == (0.6, 0.4)
    assert perturbed([0.5, 0.5], [0.0, 0.0]) == (0.5, 0.5)


@given(st.floats(-10, 10), st.floats(0, 0.99))
def test_a_model_that_nobody_trains_stays_what_it_is(model: float, gamma: float) -> None:
    assert with_momentum(model, model, None, gamma=gamma) == model
    assert with_momentum(model, model, model, gamma=gamma) == model


def test_a_buffer_that_was_never_written_nearly_doubles_the_model() -> None:
    assert with_momentum(1.0, 1.0, 0.0) == 1.9
    assert with_momentum(1.0, 1.0, None) == 1.0


def test_momentum_goes_on_in_the_last_direction() -> None:
    moved = with_momentum(
        np.array([2.0, 0.0]), np.array([1.0, 0.0]), np.array([0.0, 0.0]), gamma=0.5
    )
    np.testing.assert_allclose(moved, [2.5, 0.0])


def momentum_of(num_merges: int, dtypes: list[torch.dtype]) -> MergeMomentum:
    """The momentum of a model with one parameter of each type, after some merges."""
    generator = torch.Generator().manual_seed(num_merges)
    parameters = {
        f"layer/{number}": torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        for number, dtype in enumerate(dtypes)
    }
    momentum = MergeMomentum(parameters, gamma=0.5)
    for _ in range(num_merges):
        momentum.begin()
        means = [
            parameter.to(torch.promote_types(parameter.dtype, torch.float32)) + 1
            for parameter in parameters.values()
        ]
        momentum.move_to(momentum.added_to(means))
    return momentum


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


@pytest.mark.parametrize("num_merges", range(3))
def test_the_state_of_the_momentum_arrives_to_the_bit(num_merges: int) -> None:
    sent, received = momentum_of(num_merges, DTYPES), momentum_of(3, DTYPES)
    received.from_bytes(sent.to_bytes())
    expected, state = sent.state(), received.state()
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor)
        assert state[key].dtype == tensor.dtype


def test_the_momentum_of_another_model_is_refused() -> None:
    received = momentum_of(1, DTYPES)
    for payload in (momentum_of(1, DTYPES[:2]).to_bytes(), momentum_of(1, DTYPES).to_bytes()[:-8]):
        with pytest.raises(WireError, match="do all ranks train the same model"):
            received.from_bytes(payload)
