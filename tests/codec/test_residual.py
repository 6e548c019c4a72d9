"""Error feedback: sent + owed == gradient, staged until committed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec import cuda, selectors
from offbeat.codec.momentum import Momentum, MomentumRange
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.select import THRESHOLD
from offbeat.codec.sparse import Sparse, keep_largest
from offbeat.codec.topk_codec import SELECTORS

CPU = torch.device("cpu")


def feedback(
    num_elements: int,
    dtype: torch.dtype = torch.float32,
    selection: str = "exact",
    momentum: Momentum | float | None = None,
) -> ErrorFeedback:
    return ErrorFeedback(
        num_elements,
        dtype=dtype,
        device=CPU,
        selector=SELECTORS[selection],
        momentum=momentum,
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
        monkeypatch.setattr(selectors, "select", cuda)


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


@given(
    st.lists(st.sampled_from(["commit", "discard", "all"]), max_size=8),
    st.sampled_from([None, 0.5]),
)
def test_discarded_steps_leave_no_trace(steps: list[str], momentum: float | None) -> None:
    n = 50
    tried, sure = feedback(n, momentum=momentum), feedback(n, momentum=momentum)
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
        if tried.velocity is not None and sure.velocity is not None:
            assert torch.equal(tried.velocity, sure.velocity)


def test_buffers_are_traded_not_copied() -> None:
    state, flat = feedback(100), integers(100, 0)
    before = state.residual.data_ptr()
    state.stage(flat, 3)
    returned = state.commit(nothing(100, flat.dtype))
    assert returned.data_ptr() == before
    assert state.residual.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_correction_follows_the_papers_recipe(nesterov: bool) -> None:
    n, k = 5000, 50
    ranges = [
        MomentumRange(end=3000, factor=0.5),
        MomentumRange(end=n, factor=0.25, nesterov=nesterov),
    ]
    momentum = np.repeat([0.5, 0.25], [3000, 2000])
    looks_ahead = np.arange(n) >= (3000 if nesterov else n)
    state = feedback(n, torch.float64, momentum=Momentum(ranges))
    flat = torch.zeros(n, dtype=torch.float64)
    u, v = np.zeros(n), np.zeros(n)
    for step in range(6):
        flat.copy_(integers(n, step))
        gradient = 0.25 * flat.numpy()
        u = momentum * u + gradient
        v = v + np.where(looks_ahead, gradient + momentum * u, u)
        largest = np.sort(np.lexsort((np.arange(n), -np.abs(v)))[:k])
        picked = state.stage(flat, k, weight=0.25).sparse
        np.testing.assert_array_equal(picked.indices, largest)
        np.testing.assert_array_equal(picked.values, v[largest])
        v[largest] = 0
        flat = state.commit(nothing(n, flat.dtype))
        assert state.velocity is not None
        np.testing.assert_array_equal(state.velocity.numpy(), u)
        np.testing.assert_array_equal(state.residual.numpy(), v)


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


@pytest.mark.parametrize("densities", [(4, 4, 4), (4, 5, 4), (5, 5, 4), (5, 4, 5)])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_at_once_comes_to_the_sum_of_steps(
    densities: tuple[int, ...], continues: bool, looks: bool, dtype: torch.dtype, nesterov: bool
) -> None:
    n, factor = 10, 0.5
    state = ErrorFeedback(
        n,
        dtype=dtype,
        device=torch.device("cpu"),
        selector=SELECTORS["exact"],
        momentum=Momentum([MomentumRange(end=n, factor=factor, nesterov=nesterov)]),
    )
    sent, given, longer = torch.zeros(n), torch.zeros(n), 1.0
    for step, k in enumerate(densities):
        gradient = integers(n, step, dtype)
        given += gradient.float()
        # The optimizer's step is so many times as long, and what is owed keeps its unit.
        before, longer = longer, 1 / (1 - factor) if k < 5 else 1.0
        state.residual.mul_(before / longer)
        sent += longer * torch.from_numpy(
            state.stage(
                gradient.clone(), k, continues=continues and step == 1, at_once=k < 5
            ).sparse.to_dense()
        )
        state.commit(nothing(n, dtype))
        if looks:
            assert state.velocity is not None
    velocity = state.velocity
    assert velocity is not None
    assert bool(velocity.any()) is (densities[-1] == 5)
    # What velocity is left has yet to move the parameters: 1/2 + 1/4 + ... of itself, and by one
    # term less where Nesterov's momentum has looked ahead.
    all_of_it = sent + longer * state.residual + velocity * (0.5 if nesterov else 1.0)
    torch.testing.assert_close(all_of_it, given / (1 - factor))


def test_sending_everything_leaves_momentum_alone() -> None:
    state, flat = feedback(10, momentum=0.5), integers(10, 0)
    gradient = flat.clone()
    assert state.stage_all(flat)
    state.commit_all()
    assert state.velocity is not None
    assert torch.equal(state.velocity, gradient)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    n = 5000
    state = feedback(n, dtype, "reuse", momentum=0.5)
    state.stage(integers(n, 0, dtype), 50)
    flat = state.commit(nothing(n, dtype))
    assert state.velocity is not None
    before = state.residual.clone(), state.velocity.clone(), state.selector_state
    for densely in (False, True):
        flat.copy_(integers(n, 1, dtype))
        flat[1234] = float("nan")
        assert not (state.stage_all(flat) if densely else state.stage(flat, 50).finite)
        state.discard()
        assert torch.equal(state.residual, before[0])
        assert torch.equal(state.velocity, before[1])
        assert state.selector_state == before[2]


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
