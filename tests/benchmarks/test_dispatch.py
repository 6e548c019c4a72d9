"""Whoever is free takes the next batch: every sample once, and nobody waits longer than
one batch.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _ceilings import dispatch, gain

workers = st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 10.0)), min_size=1, max_size=8)


@given(workers, st.integers(1, 5000))
def test_every_sample_is_dealt_out_once(drawn: list[tuple[int, float]], num_samples: int) -> None:
    sizes, speeds = [size for size, _ in drawn], [speed for _, speed in drawn]
    done = dispatch(sizes, num_samples, lambda rank, samples: samples / speeds[rank])
    assert sum(done.samples) == num_samples
    for size, updates, samples in zip(sizes, done.updates, done.samples, strict=True):
        assert (updates - 1) * size < samples <= updates * size or samples == updates == 0


@given(workers, st.integers(1, 5000))
def test_nobody_waits_longer_than_the_longest_batch_takes(
    drawn: list[tuple[int, float]], num_samples: int
) -> None:
    sizes, speeds = [size for size, _ in drawn], [speed for _, speed in drawn]
    done = dispatch(sizes, num_samples, lambda rank, samples: samples / speeds[rank])
    longest_s = max(size / speed for size, speed in drawn)
    assert done.duration_s - min(done.finished_s) <= longest_s * (1 + 1e-9)
    assert num_samples / sum(speeds) <= done.duration_s * (1 + 1e-9)
    assert 0.0 <= done.waiting < 1.0


@pytest.mark.parametrize(
    "speeds",
    [(1.0, 1.0, 1.0, 1.0), (1.0, 0.92, 0.84, 0.76), (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 0.25, 0.25)],
)
def test_equal_batches_dealt_out_on_demand_reach_95_percent_of_the_summed_speed(
    speeds: tuple[float, ...],
) -> None:
    done = dispatch([64] * 4, 50 * 4 * 64, lambda rank, samples: samples / speeds[rank])
    assert 50 * 4 * 64 / done.duration_s >= 0.95 * sum(speeds)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_uneven_workers_have_something_to_gain(speeds: list[float]) -> None:
    assert 1.0 - 1e-9 <= gain(speeds) <= max(speeds) / min(speeds) + 1e-9
