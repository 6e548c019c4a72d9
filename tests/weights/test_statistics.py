"""Statistics take plain means, so that they never leave the range of what ranks have held."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.weights.model_weights import BufferNames, ModelWeights, Staging
from offbeat.weights.statistics import merge_statistics, merge_sums_

statistic = st.floats(0, 1e6, width=32)


@given(statistic, statistic, statistic)
def test_a_merged_statistic_lies_between_what_the_two_sides_hold(
    mine: float, theirs: float, before: float
) -> None:
    arrays = [np.array([value], np.float32) for value in (mine, theirs, before)]
    merged = merge_statistics(*arrays)
    assert merged.dtype == np.float32
    assert arrays[0].min(initial=theirs) <= merged[0] <= arrays[0].max(initial=theirs)
    tensors = [torch.tensor([value]) for value in (mine, theirs, before)]
    assert merge_statistics(*tensors).tolist() == merged.tolist()


@given(statistic, statistic)
def test_where_one_side_changed_nothing_the_other_ones_value_holds(old: float, new: float) -> None:
    before, changed = np.array([old]), np.array([new])
    assert merge_statistics(before, changed, before) == changed
    assert merge_statistics(changed, before, before) == changed


def test_the_statistics_of_a_vector_are_found_behind_the_parameters_of_each_type() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.BatchNorm1d(3))
    weights = ModelWeights(
        parameters=dict(net.named_parameters()),
        buffers=lambda: dict(net.named_buffers()),
        chosen=BufferNames(("1.running_mean", "1.running_var"), ("1.num_batches_tracked",)),
    )
    staging = Staging(weights.tensors())
    net[1].running_mean.fill_(7)
    net[1].running_var.fill_(8)
    vector = staging.read(weights.tensors())
    (span,) = staging.spans(weights.positions_of_statistics())
    assert vector[span].tolist() == [7] * 3 + [8] * 3


@given(
    st.lists(st.tuples(*[st.sampled_from([-0.0, 0.0, 0.1, 1.0, 1e-3, 7.0])] * 3), max_size=5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_a_sum_keeps_what_both_sides_have_added(
    cases: list[tuple[float, float, float]], dtype: torch.dtype, is_strided: bool
) -> None:
    """One by one, in any memory layout; to the bit where only one side has changed it."""
    mine, before = (
        torch.tensor([case[place] for case in cases], dtype=dtype).reshape(-1) for place in (0, 2)
    )
    wide = torch.promote_types(dtype, torch.float32)
    theirs = torch.tensor([case[1] for case in cases], dtype=wide).reshape(-1)
    merged = torch.stack([mine, mine], dim=1)[:, 0] if is_strided else mine.clone()
    merge_sums_(merged, theirs, before)
    for now, one, two, past in zip(merged, mine, theirs, before, strict=True):
        if one == past:
            expected = two
        elif two == past:
            expected = one
        else:
            expected = two + (one.to(wide) - past.to(wide))
        assert now == expected.to(dtype)
        assert now.signbit() == expected.signbit()
