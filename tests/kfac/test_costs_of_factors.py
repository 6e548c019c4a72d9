"""What is timed stands for what the model has."""

from __future__ import annotations

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac.costs import LARGEST_DIM, MAX_SIZES, inversion_clock, measure, sizes_to_time
from offbeat.kfac.placement import TabledInversion
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank


@given(st.lists(st.integers(1, 3 * LARGEST_DIM), min_size=1, max_size=40))
def test_the_sizes_that_are_timed_are_the_models_own(dims: list[int]) -> None:
    sizes = sizes_to_time(dims)
    own = {min(dim, LARGEST_DIM) for dim in dims}
    assert sizes == sorted(set(sizes))
    assert set(sizes) <= own
    assert len(sizes) == min(len(own), MAX_SIZES)
    assert (sizes[0], sizes[-1]) == (min(own), max(own))


def test_costs_are_a_table_of_what_was_timed() -> None:
    timed: list[int] = []
    costs = measure(
        SingleRank(),
        Stream(1),
        dims=[3, 5, 3],
        like=torch.zeros(0),
        invert=lambda matrix: timed.append(matrix.shape[0]),
    )
    assert sorted(set(timed)) == [3, 5]
    assert isinstance(costs.inverse.inversion, TabledInversion)
    assert costs.inverse.inversion.dims == (3, 5)
    assert costs.inverse.fused


def test_a_processors_time_counts_where_ranks_may_share_one() -> None:
    assert inversion_clock(torch.device("cpu"), time.monotonic) is time.thread_time
    assert inversion_clock(torch.device("cuda"), time.monotonic) is time.monotonic
