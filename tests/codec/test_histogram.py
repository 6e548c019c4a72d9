"""Counting magnitudes and granting quotas, against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from offbeat.codec import histogram as histograms
from offbeat.codec.histogram import Histogram, histogram, quotas
from offbeat.codec.sparse import Sparse
from offbeat.errors import WireError

VALUES = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1.5, 3e38, 1e-40]), st.floats(-8, 8, width=32))


def sparse_of(values: NDArray[np.floating]) -> Sparse:
    return Sparse(indices=np.arange(values.size), values=values, num_elements=values.size)


def magnitudes_of(values: NDArray[np.floating]) -> NDArray[np.uint32]:
    """Descending."""
    return np.sort(np.abs(values).astype(np.float32).view(np.uint32) >> 15)[::-1]


@st.composite
def owners_values(draw: st.DrawFn) -> list[NDArray[np.floating]]:
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return draw(
        st.lists(hnp.arrays(dtype, st.integers(0, 12), elements=VALUES), min_size=1, max_size=5)
    )


@pytest.fixture(autouse=True)
def narrow_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few entries are enough for some to be left out."""
    monkeypatch.setattr(histograms, "MARGIN", 1)


@given(owners_values(), st.integers(1, 40), st.integers(1, 5))
def test_magnitudes_near_the_share_are_counted(
    parts: list[NDArray[np.floating]], k: int, world_size: int
) -> None:
    values = parts[0]
    counted = histogram(sparse_of(values), k, world_size)
    assert (np.diff(counted.magnitudes.astype(np.int64)) < 0).all()
    share = k // world_size
    expected = magnitudes_of(values)
    surely_kept = max(0, share // 2 - 1)
    if values.size > surely_kept:
        expected = np.minimum(expected[: min(k, 2 * share + 1)], expected[surely_kept])
    np.testing.assert_array_equal(np.repeat(counted.magnitudes, counted.counts), expected)


@given(owners_values(), st.integers(1, 40))
def test_quotas_leave_the_k_largest(parts: list[NDArray[np.floating]], k: int) -> None:
    everything = [histogram(sparse_of(values), 1000, 1) for values in parts]
    keeps = quotas(everything, k)
    assert sum(keeps) == min(k, sum(values.size for values in parts))
    kept = [magnitudes_of(values)[:keep] for values, keep in zip(parts, keeps, strict=True)]
    largest = magnitudes_of(np.concatenate(parts))[:k]
    np.testing.assert_array_equal(np.sort(np.concatenate(kept))[::-1], largest)
    # at the boundary lower ranks come first: nobody who was refused such an entry stands before one
    # who was granted it
    refused = False
    for values, keep in zip(parts, keeps, strict=True):
        at_boundary = magnitudes_of(values) == largest.min(initial=0xFFFF)
        assert not (refused and at_boundary[:keep].any())
        refused |= bool(at_boundary[keep:].any())


@given(owners_values())
def test_messages_come_back_as_they_were(parts: list[NDArray[np.floating]]) -> None:
    sent = histogram(sparse_of(parts[0]), 20, 1)
    received = Histogram.from_bytes(sent.to_bytes())
    np.testing.assert_array_equal(received.magnitudes, sent.magnitudes)
    np.testing.assert_array_equal(received.counts, sent.counts)


def test_truncated_and_overlong_messages_are_refused() -> None:
    message = histogram(sparse_of(np.array([1.0, 2.0])), 2, 1).to_bytes()
    for damaged in [message[:length] for length in range(len(message))] + [message + b"\0"]:
        with pytest.raises(WireError, match="histogram"):
            Histogram.from_bytes(damaged)
