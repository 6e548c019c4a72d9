"""SparseLoCo's codec: chunks, levels, and places in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.few_bits import LevelValues
from offbeat.codec.sparse import Sparse
from offbeat.codec.sparseloco import ChunkIndices, ChunkSelector, SparseLoCo
from offbeat.codec.tally import Tally
from offbeat.codec.wire import pair_bytes
from offbeat.errors import WireError

TALLY = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, np.bool_))


def drawn(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (64, 8), (65, 9), (1000, 125), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_chunk_gives_its_largest_and_keeps_the_rest(
    n: int, k: int, dtype: torch.dtype
) -> None:
    change, owed = drawn(n).to(dtype), drawn(n, seed=1).to(dtype)
    total = owed + 0.5 * change
    picked = ChunkSelector(64).select(change, owed, k=k, weight=0.5, state={}).sparse
    assert (np.diff(picked.indices) > 0).all()
    assert k <= len(picked) <= k + n // 64 + 64 * k / n
    torch.testing.assert_close(torch.from_numpy(picked.to_dense()) + change, total, rtol=0, atol=0)
    sent = torch.from_numpy(picked.to_dense()) != 0
    for left, chunk, gone in zip(
        change.split(64), total.abs().split(64), sent.split(64), strict=True
    ):
        if gone.any():
            assert left.abs().max() <= chunk[gone].min()


def test_zeros_are_not_picked_and_what_is_not_finite_is_said() -> None:
    zeros = torch.zeros(100)
    selector = ChunkSelector(16)
    assert not len(selector.select(zeros, torch.zeros(100), k=10, weight=1.0, state={}).sparse)
    zeros[3] = float("nan")
    assert not selector.select(zeros, torch.zeros(100), k=10, weight=1.0, state={}).finite


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=50), st.sampled_from([1, 2, 4, 8])
)
def test_values_keep_their_sum_in_any_number_of_levels(values: list[float], bits: int) -> None:
    codec, sent = LevelValues(bits), np.array(values, np.float32)
    coded = codec.encode(sent)
    assert coded.size == codec.num_bytes(sent.size)
    decoded = codec.decode(coded.view(np.uint8), sent.size).astype(np.float64)
    scale = float(np.abs(sent).max(initial=0)) * max(1, sent.size)
    np.testing.assert_allclose(decoded.sum(), sent.sum(dtype=np.float64), atol=1e-6 * scale)
    assert np.unique(decoded).size <= 1 << bits


@given(st.sets(st.integers(0, 999)), st.sampled_from([2, 10, 64, 4096]))
def test_places_in_chunks_are_read_as_they_were_written(places: set[int], size: int) -> None:
    codec, indices = ChunkIndices(size), np.array(sorted(places), np.int64)
    layout, coded = codec.encode(indices, 1000)
    assert codec.decode(layout, coded.view(np.uint8), indices.size, 1000).tolist() == sorted(places)
    assert coded.nbytes == pytest.approx(codec.expected_bytes(indices.size, 1000), abs=1)
    with pytest.raises(WireError):
        codec.decode(layout, coded.view(np.uint8), indices.size + 8, 1000)


def test_a_message_takes_a_quarter_of_a_bit_an_element() -> None:
    """14 bits for each 64th, and 2 bytes a chunk: .22 bits."""
    codec, n = SparseLoCo(), 1 << 20
    change = drawn(n)
    picked = codec.entries.selector.select(
        change, torch.zeros(n), k=round(codec.density * n), weight=1.0, state={}
    ).sparse
    wire = codec.entries.wire(n, num_parameters=1, dtype=np.dtype(np.float32))
    payload, lost = wire.encode(picked, TALLY)
    assert 0.22 < 8 * len(payload) / n < 0.225
    expected = pair_bytes(wire.values, wire.indices, k=len(picked), num_elements=n)
    assert len(payload) == pytest.approx(expected * len(picked), rel=0.01)
    arrived, _ = wire.decode(payload)
    assert np.unique(arrived.values).size == 4
    np.testing.assert_allclose(
        arrived.to_dense() + lost.to_dense(), picked.to_dense(), rtol=1e-6, atol=1e-6
    )


def test_an_empty_message_has_no_levels() -> None:
    codec = SparseLoCo().entries
    wire = codec.wire(100, num_parameters=1, dtype=np.dtype(np.float32))
    decoded, _ = wire.decode(wire.encode(Sparse.empty(100, np.float32), TALLY)[0])
    assert len(decoded) == 0
