"""Error feedback: sent + owed == gradient, staged until committed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec import cuda, selectors
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.selectors import THRESHOLD
from offbeat.codec.sparse import Sparse, keep_largest
from offbeat.codec.topk_codec import SELECTORS

CPU = torch.device("cpu")


def feedback(
    num_elements: int,
    dtype: torch.dtype = torch.float32,
    selection: str = "exact",
) -> ErrorFeedback:
    return ErrorFeedback(
        num_elements,
        dtype=dtype,
        device=CPU,
        selector=SELECTORS[selection],
    )


def integers(num_elements: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every dtype used here."""
    return torch.randint(-9, 10, (num_elements,), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


def nothing(num_elements: int, dtype: torch.dtype) -> Sparse:
    return Sparse.empty(num_elements, np.float64 if dtype == torch.float64 else np.float32)


@pytest.fixture(params=["kernels", "torch"])
def either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(selectors, "exact", cuda.exact)
        monkeypatch.setattr(selectors, "reuse", cuda.reuse)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selection", SELECTORS)
def test_over_steps_nothing_is_lost(dtype: torch.dtype, selection: str) -> None:
    n, k = 6000, 60
    state = feedback(n, dtype, selection)
    gradients, sent, flat = torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=dtype)
    for step in range(8):
        flat.copy_(integers(n, step, dtype))
        gradients += flat
        picked = state.stage(flat, k).sparse
        kept, dropped = keep_largest(picked, k // 2)
        sent += torch.from_numpy(kept.to_dense())
        flat = state.commit(dropped)
        assert flat.dtype == dtype
        assert not flat.any()
    assert torch.equal(sent + state.residual, gradients)


@given(st.lists(st.sampled_from(["commit", "discard", "all"]), max_size=8))
def test_discarded_steps_leave_no_trace(steps: list[str]) -> None:
    n = 50
    tried, sure = feedback(n), feedback(n)
    for step, what in enumerate(steps):
        flat, other = integers(n, step), integers(n, step)
        if what == "all":
            assert tried.stage_all(flat)
            tried.commit_all()
            assert sure.stage_all(other)
            sure.commit_all()
        elif what == "discard":
            tried.stage(flat, 5)
            tried.discard()
        else:
            tried.stage(flat, 5)
            tried.commit(nothing(n, flat.dtype))
            sure.stage(other, 5)
            sure.commit(nothing(n, flat.dtype))
        assert torch.equal(tried.residual, sure.residual)


def test_buffers_are_traded_not_copied() -> None:
    state, flat = feedback(100), integers(100, 0)
    before = state.residual.data_ptr()
    state.stage(flat, 3)
    returned = state.commit(nothing(100, flat.dtype))
    assert returned.data_ptr() == before
    assert state.residual.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sending_everything_pays_what_was_owed(dtype: torch.dtype) -> None:
    n = 300
    state, first, second = feedback(n, dtype), integers(n, 0, dtype) / 3, integers(n, 1, dtype) / 7
    total = first.float() + second.float()
    sent = torch.from_numpy(state.stage(first.clone(), 10).sparse.to_dense())
    state.commit(nothing(n, dtype))
    assert state.stage_all(second)
    assert second.dtype == dtype
    state.commit_all()
    assert torch.equal(sent + second.float() + state.residual, total)
    if dtype == torch.float32:
        assert not state.residual.any()


def test_half_precision_is_owed_from_what_was_given_in_float32() -> None:
    n, k = 50, 5
    state, exact = feedback(n, torch.bfloat16), integers(n, 0) / 3
    flat = exact.to(torch.bfloat16)
    picked = state.stage(flat, k, gradient=exact).sparse
    returned = state.commit(nothing(n, torch.bfloat16))
    assert returned.data_ptr() == flat.data_ptr()
    assert torch.equal(torch.from_numpy(picked.to_dense()) + state.residual, exact)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    n = 5000
    state = feedback(n, dtype, "reuse")
    state.stage(integers(n, 0, dtype), 50)
    flat = state.commit(nothing(n, dtype))
    before = state.residual.clone(), state.selector_state
    for densely in (False, True):
        flat.copy_(integers(n, 1, dtype))
        flat[1234] = float("nan")
        assert not (state.stage_all(flat) if densely else state.stage(flat, 50).finite)
        state.discard()
        assert torch.equal(state.residual, before[0])
        assert state.selector_state == before[1]


def test_reuse_resumes_from_its_state() -> None:
    n, k = 6000, 60
    first, flat = feedback(n, selection="reuse"), torch.zeros(n)

    def step(state: ErrorFeedback, seed: int) -> Sparse:
        gradient = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        picked = state.stage(gradient, k).sparse
        state.commit(nothing(n, flat.dtype))
        return picked

    for seed in range(4):
        step(first, seed)
    resumed = feedback(n, selection="reuse")
    resumed.residual.copy_(first.residual)
    resumed.selector_state.update(first.selector_state)
    for seed in range(4, 8):
        np.testing.assert_array_equal(step(resumed, seed).indices, step(first, seed).indices)


def test_sending_everything_keeps_the_threshold() -> None:
    state = feedback(100, selection="reuse")
    state.selector_state[THRESHOLD] = 2.5
    assert state.stage_all(integers(100, 0))
    state.commit_all()
    assert state.selector_state == {THRESHOLD: 2.5}


@pytest.mark.parametrize("selection", SELECTORS)
def test_an_empty_bucket_is_no_trouble(selection: str) -> None:
    state, flat = feedback(0, selection=selection), torch.zeros(0)
    assert len(state.stage(flat, 1).sparse) == 0
    flat = state.commit(nothing(0, flat.dtype))
    assert state.stage_all(flat)
    state.commit_all()
    assert flat.numel() == 0
