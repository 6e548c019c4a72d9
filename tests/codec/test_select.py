"""Selection against a slow oracle, on the CPU kernels and on the torch passes that serve
accelerators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.codec import cuda, jit, selectors
from offbeat.codec.jit import COMPILED
from offbeat.codec.selectors import THRESHOLD, KeptThreshold, Selection

NUM_ELEMENTS = 20_011
"""More than `selectors.SMALL`, so that a threshold is guessed; and no multiple of any block."""

Distribution = Callable[[np.random.Generator, int], NDArray[np.floating]]


class Exact(Protocol):
    def __call__(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float
    ) -> Selection: ...


class Reuse(Protocol):
    def __call__(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, threshold: float
    ) -> Selection: ...


def spikes(count: int) -> Distribution:
    def draw(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        values = np.zeros(n)
        values[rng.choice(n, size=count, replace=False)] = rng.standard_normal(count)
        return values

    return draw


def layered(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.standard_normal(n) * np.exp(rng.standard_normal(n // 500 + 1) * 4).repeat(500)[:n]


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "heavy tails": lambda rng, n: rng.standard_cauchy(n),
    "layers of different scale": layered,
    "all zero": lambda rng, n: np.zeros(n),
    "all equal": lambda rng, n: np.full(n, -0.25),
    "equal magnitudes": lambda rng, n: rng.choice([-1.5, 1.5], n),
    "few values": lambda rng, n: rng.integers(-2, 3, n).astype(np.float64),
    "one spike": spikes(1),
    "fewer nonzeros than k": spikes(13),
    "about k nonzeros": spikes(60),
    "subnormal": lambda rng, n: (
        rng.integers(-50, 50, n) * float(np.finfo(np.float32).smallest_subnormal)
    ),
    "periodic": lambda rng, n: np.where(np.arange(n) % 64 == 5, 1.0, 1e-3) * rng.standard_normal(n),
    "sorted": lambda rng, n: np.sort(rng.standard_normal(n)),
    "huge": lambda rng, n: rng.standard_normal(n) * 1e37,
}


def ranked(accumulated: NDArray[np.floating]) -> NDArray[np.int64]:
    """Indices from the largest on, ties to the lower index, zeros never."""
    order = np.lexsort((np.arange(accumulated.size), -np.abs(accumulated)))
    return order[accumulated[order] != 0]


def oracle(accumulated: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the `k` largest, in order."""
    return np.sort(ranked(accumulated)[:k])


@pytest.fixture(params=["kernels", "torch"])
def exact(request: pytest.FixtureRequest) -> Exact:
    return selectors.exact if request.param == "kernels" else cuda.exact


@pytest.fixture(params=["kernels", "torch"])
def reuse(request: pytest.FixtureRequest) -> Reuse:
    return selectors.reuse if request.param == "kernels" else cuda.reuse


def drawn(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient and a residual whose sum is of the named distribution, exactly."""
    total = DISTRIBUTIONS[name](np.random.default_rng(seed), NUM_ELEMENTS)
    flat = torch.from_numpy(total).to(dtype)
    residual = torch.zeros_like(flat)
    residual[::2], flat[::2] = flat[::2].clone(), 0
    return flat, residual


def assert_selected(
    selection: Selection, left: torch.Tensor, accumulated: torch.Tensor, indices: NDArray[np.int64]
) -> None:
    assert selection.finite
    np.testing.assert_array_equal(selection.sparse.indices, indices)
    np.testing.assert_array_equal(selection.sparse.values, accumulated.numpy()[indices])
    assert selection.sparse.num_elements == accumulated.numel()
    expected = accumulated.clone()
    expected[torch.from_numpy(indices)] = 0
    assert torch.equal(left, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_exact_selection_equals_the_oracle(exact: Exact, name: str, dtype: torch.dtype) -> None:
    gradient, residual = drawn(name, dtype)
    accumulated, residual_before = gradient + residual, residual.clone()
    largest_first = ranked(accumulated.numpy())
    for k in (1, 61, 6000, NUM_ELEMENTS):
        flat = gradient.clone()
        selection = exact(flat, residual, k=k, weight=1.0)
        assert_selected(selection, flat, accumulated, np.sort(largest_first[:k]))
        assert torch.equal(residual, residual_before)


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40]), max_size=300), st.integers(1, 300)
)
def test_exact_selection_of_few_elements(values: list[float], k: int) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    accumulated = flat.clone()
    selection = selectors.exact(flat, torch.zeros_like(flat), k=min(k, flat.numel()), weight=1.0)
    assert_selected(selection, flat, accumulated, oracle(accumulated.numpy(), k))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_fallback_equals_the_oracle(name: str, dtype: type[np.floating]) -> None:
    values = DISTRIBUTIONS[name](np.random.default_rng(1), 5000).astype(dtype)
    for k in (1, 70, 4999, 5000):
        np.testing.assert_array_equal(
            selectors.largest_of_all(values, k).indices, oracle(values, k)
        )


def test_a_sample_that_misleads_does_no_harm() -> None:
    k, flat = 61, torch.full((NUM_ELEMENTS,), 0.5)
    plan = selectors.sample_plan(NUM_ELEMENTS, k)
    assert plan is not None
    assert plan.rank < k
    places = np.empty(plan.num_samples)
    selectors.sample_magnitudes(
        np.arange(float(NUM_ELEMENTS)), np.zeros(NUM_ELEMENTS), np.float64(1), places
    )
    flat[torch.from_numpy(places[: plan.rank].astype(np.int64))] = (
        3.0  # fewer than k, and all of them in the sample
    )
    accumulated = flat.clone()
    selection = selectors.exact(flat, torch.zeros(NUM_ELEMENTS), k=k, weight=1.0)
    assert_selected(selection, flat, accumulated, oracle(accumulated.numpy(), k))


def test_the_weight_is_applied_once_and_rounded_as_separate_operations() -> None:
    rng = np.random.default_rng(2)
    gradient, owed = (rng.standard_normal(NUM_ELEMENTS).astype(np.float32) for _ in range(2))
    accumulated = owed + np.float32(0.3) * gradient
    flat = torch.from_numpy(gradient)
    selection = selectors.exact(flat, torch.from_numpy(owed), k=200, weight=0.3)
    assert_selected(selection, flat, torch.from_numpy(accumulated), oracle(accumulated, 200))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_reuse_stays_near_k_whatever_the_last_threshold(reuse: Reuse, name: str) -> None:
    gradient, residual = drawn(name, torch.float32)
    accumulated, k = gradient + residual, 61
    nonzeros = int(torch.count_nonzero(accumulated))
    largest_first = ranked(accumulated.numpy())
    for threshold in (0.0, 1e-30, 1.0, 2.7, 1e30, float("inf")):
        flat = gradient.clone()
        selection = reuse(flat, residual, k=k, weight=1.0, threshold=threshold)
        assert 0.8 * k <= len(selection.sparse) <= 1.2 * k or len(selection.sparse) == nonzeros < k
        assert_selected(
            selection, flat, accumulated, np.sort(largest_first[: len(selection.sparse)])
        )


def test_reuse_adapts_instead_of_starting_over(reuse: Reuse) -> None:
    rng, k, threshold, reused = np.random.default_rng(3), 200, 0.0, 0
    residual = torch.zeros(NUM_ELEMENTS)
    for step in range(30):
        flat = torch.from_numpy(rng.standard_normal(NUM_ELEMENTS).astype(np.float32) * 1.01**step)
        selection = reuse(flat, residual, k=k, weight=1.0, threshold=threshold)
        reused += len(selection.sparse) != k
        threshold = selection.state[THRESHOLD]
    assert reused >= 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 77, NUM_ELEMENTS - 1])
def test_what_is_not_finite_is_reported(exact: Exact, reuse: Reuse, bad: float, place: int) -> None:
    flat, residual = drawn("normal", torch.float32)
    flat[place] = bad
    for selection in (
        exact(flat.clone(), residual, k=50, weight=1.0),
        reuse(flat.clone(), residual, k=50, weight=1.0, threshold=2.5),
    ):
        assert not selection.finite
        assert len(selection.sparse) == 0


def test_nothing_but_nans_is_no_trouble(exact: Exact) -> None:
    flat = torch.full((NUM_ELEMENTS,), float("nan"))
    assert not exact(flat, torch.zeros(NUM_ELEMENTS), k=50, weight=1.0).finite


def test_kernels_are_compiled_for_all_that_is_used() -> None:
    jit.warm()
    assert jit.is_compiled()
    before = [len(kernel.signatures) for kernel in COMPILED]  # type: ignore[attr-defined]
    for name in ("normal", "all equal"):
        for dtype in (torch.float32, torch.float64):
            flat, residual = drawn(name, dtype)
            selectors.exact(flat, residual, k=100, weight=0.5)
            state = selectors.reuse(flat, residual, k=300, weight=0.5, threshold=0.0).state
            selectors.reuse(flat, residual, k=300, weight=0.5, threshold=state[THRESHOLD])
    assert [len(kernel.signatures) for kernel in COMPILED] == before  # type: ignore[attr-defined]


N, K = 20_000, 200


def gradient(step: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(N, generator=torch.Generator().manual_seed(step))


class Owed:
    """What was not sent, and what the selector remembers."""

    def __init__(self, period: int) -> None:
        self.selector, self.residual = KeptThreshold(period), torch.zeros(N)
        self.selector_state = self.selector.initial_state()


def step(owed: Owed, flat: torch.Tensor) -> int:
    """How many entries travel."""
    selection = owed.selector.select(
        flat, owed.residual, k=K, weight=1.0, state=owed.selector_state
    )
    assert selection.finite
    owed.residual, owed.selector_state = flat, selection.state
    return len(selection.sparse)


def test_what_travels_is_all_that_reaches_the_threshold() -> None:
    owed = Owed(period=1000)
    for number in range(100):  # until as much is sent as comes
        step(owed, gradient(number))
    threshold, counts = owed.selector_state[THRESHOLD], set()
    for number in range(100, 110):
        reached = int(((owed.residual + gradient(number)).abs() >= threshold).sum())
        assert step(owed, gradient(number)) == reached
        assert owed.selector_state[THRESHOLD] == threshold
        assert float(owed.residual.abs().max()) < threshold
        counts.add(reached)
    assert len(counts) > 1


def test_after_a_period_the_threshold_is_that_of_the_k_largest() -> None:
    owed, sought = Owed(period=3), []
    for number in range(7):
        owed.residual.zero_()
        step(owed, gradient(number))
        if owed.selector_state["age"] == 1:
            sought.append(number)
            least = gradient(number).abs().topk(K).values.min().item()
            assert owed.selector_state[THRESHOLD] == pytest.approx(least)
    assert sought == [0, 3, 6]


@pytest.mark.parametrize("scale", [5.0, 1 / 5])
def test_where_the_count_runs_away_a_period_begins(scale: float) -> None:
    owed = Owed(period=1000)
    step(owed, gradient(0))
    owed.residual.zero_()
    before = owed.selector_state[THRESHOLD]
    assert step(owed, gradient(1, scale)) == K
    assert owed.selector_state[THRESHOLD] == pytest.approx(scale * before, rel=0.1)
    assert owed.selector_state["age"] == 1


def test_a_threshold_that_exactly_k_entries_reach_is_sought_anew_after_a_period() -> None:
    selector, ages, thresholds = KeptThreshold(period=3), [], []
    state = selector.initial_state()
    for step in range(6):
        flat = torch.zeros(8)
        flat[0], flat[1] = 4.0 + step, 1.0
        state = selector.select(flat, torch.zeros(8), k=1, weight=1.0, state=state).state
        ages.append(state["age"])
        thresholds.append(state[THRESHOLD])
    assert ages == [1, 2, 3, 1, 2, 3]
    assert thresholds == [4, 4, 4, 7, 7, 7]
