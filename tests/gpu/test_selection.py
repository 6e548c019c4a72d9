"""Selection on a GPU picks bit for bit what it picks on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from codec.test_select import DISTRIBUTIONS
from gpu_support import DEVICE
from offbeat.codec import cuda, selectors
from offbeat.codec.topk_codec import SELECTORS

SIZES = (1, 5, 4096, 20_011, 3_000_017) if DEVICE == "cuda" else (4096, 20_011)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_exact_selection_is_that_of_the_cpu(
    device: torch.device, distribution: str, n: int
) -> None:
    rng = np.random.default_rng(n)
    gradient, residual = (
        torch.from_numpy(DISTRIBUTIONS[distribution](rng, max(n, 500))[:n].astype(np.float32))
        for _ in range(2)
    )
    # Half of a number below the least normal one is rounded, by each processor at another time.
    k, weight = max(1, n // 100), 1.0 if distribution == "subnormal" else 0.5
    here, there = gradient.clone(), gradient.to(device)
    expected = selectors.exact(here, residual, k=k, weight=weight)
    picked = cuda.exact(there, residual.to(device), k=k, weight=weight)
    assert picked.finite == expected.finite
    np.testing.assert_array_equal(picked.sparse.indices, expected.sparse.indices)
    np.testing.assert_array_equal(picked.sparse.values, expected.sparse.values)
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", SIZES)
def test_what_is_not_finite_is_noticed(device: torch.device, n: int, bad: float) -> None:
    flat = torch.randn(n, device=device)
    flat[n // 2] = bad
    picked = cuda.exact(flat, torch.zeros_like(flat), k=1, weight=1.0)
    assert not picked.finite
    assert not len(picked.sparse)


@pytest.mark.parametrize("name", SELECTORS)
def test_each_selector_loses_nothing(device: torch.device, name: str) -> None:
    n, selector = 100_003, SELECTORS[name]
    draw = torch.Generator().manual_seed(1)
    flat, residual = (torch.randn(n, generator=draw).to(device) for _ in range(2))
    before = (residual + flat).cpu()
    state = selector.initial_state()
    for _ in range(3):
        given = flat.clone()
        picked = selector.select(given, residual, k=n // 100, weight=1.0, state=state)
        state = picked.state
        left = given.cpu()
        left[torch.from_numpy(picked.sparse.indices)] += torch.from_numpy(picked.sparse.values)
        torch.testing.assert_close(left, before, rtol=1e-6, atol=1e-6)
