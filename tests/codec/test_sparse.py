"""Sparse vectors against dense arithmetic: nothing is lost, and the largest are kept."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from offbeat.codec import jit
from offbeat.codec.histogram import histogram, quotas
from offbeat.codec.jit import COMPILED
from offbeat.codec.sparse import (
    Sparse,
    add,
    add_all,
    keep_largest,
    owner_of,
    partition,
    split_common,
    union_disjoint,
)
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import (
    BFloat16Values,
    Float8Values,
    Float32Values,
    Float64Values,
    ValueCodec,
)
from offbeat.codec.wire import Wire
from offbeat.errors import WireError

NUM_ELEMENTS = 40
SMALL_INTEGERS = st.integers(-3, 3).map(float)
"""Sums of these are exact, they tie often, and they cancel."""


@st.composite
def dense_vectors(draw: st.DrawFn) -> NDArray[np.floating]:
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return draw(hnp.arrays(dtype, NUM_ELEMENTS, elements=SMALL_INTEGERS, fill=st.just(0.0)))


@st.composite
def sparses(draw: st.DrawFn, num_elements: int = NUM_ELEMENTS) -> Sparse:
    """With explicit zeros now and then."""
    indices = np.array(sorted(draw(st.sets(st.integers(0, num_elements - 1)))), dtype=np.int64)
    values = draw(hnp.arrays(np.float32, indices.size, elements=SMALL_INTEGERS))
    return Sparse(indices=indices, values=values, num_elements=num_elements)


def oracle_keep(dense: NDArray[np.floating], k: int) -> NDArray[np.floating]:
    order = sorted(range(dense.size), key=lambda i: (-abs(dense[i]), i))[:k]
    kept = np.zeros_like(dense)
    kept[order] = dense[order]
    return kept


def assert_well_formed(sparse: Sparse) -> None:
    assert (np.diff(sparse.indices) > 0).all()
    assert sparse.indices.dtype == np.int64
    assert sparse.values.shape == sparse.indices.shape


@given(dense_vectors())
def test_dense_round_trip(dense: NDArray[np.floating]) -> None:
    sparse = Sparse.from_dense(dense)
    assert_well_formed(sparse)
    assert len(sparse) == np.count_nonzero(dense)
    assert sparse.to_dense().dtype == dense.dtype
    np.testing.assert_array_equal(sparse.to_dense(), dense)


@given(sparses(), st.floats(-4, 4, width=32))
def test_scaling_keeps_the_dtype(sparse: Sparse, factor: float) -> None:
    scaled = sparse.scaled(factor)
    assert scaled.values.dtype == sparse.values.dtype
    np.testing.assert_array_equal(scaled.to_dense(), sparse.to_dense() * np.float32(factor))


@given(sparses(), sparses())
def test_add_is_dense_addition(a: Sparse, b: Sparse) -> None:
    total = add(a, b)
    assert_well_formed(total)
    assert set(total.indices) == set(a.indices) | set(b.indices)
    np.testing.assert_array_equal(total.to_dense(), a.to_dense() + b.to_dense())


@given(st.lists(sparses(), min_size=1, max_size=7))
def test_add_all_is_dense_addition(parts: list[Sparse]) -> None:
    np.testing.assert_array_equal(
        add_all(parts).to_dense(), np.sum([part.to_dense() for part in parts], axis=0)
    )


@given(sparses(), st.integers(0, NUM_ELEMENTS))
def test_the_largest_are_kept_and_ties_go_to_lower_indices(sparse: Sparse, k: int) -> None:
    kept, dropped = keep_largest(sparse, k)
    assert len(kept) == min(k, np.count_nonzero(sparse.values))
    assert kept.values.all()
    assert dropped.values.all()
    np.testing.assert_array_equal(kept.to_dense(), oracle_keep(sparse.to_dense(), k))
    np.testing.assert_array_equal(kept.to_dense() + dropped.to_dense(), sparse.to_dense())


@given(sparses(), sparses(), st.integers(0, NUM_ELEMENTS))
def test_a_merge_loses_nothing(a: Sparse, b: Sparse, k: int) -> None:
    kept, dropped = keep_largest(add(a, b), k)
    assert len(kept) <= k
    assert not set(kept.indices) & set(dropped.indices)
    np.testing.assert_array_equal(kept.to_dense() + dropped.to_dense(), a.to_dense() + b.to_dense())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_even_infinities_and_nans_are_not_lost(dtype: type[np.floating]) -> None:
    sparse = Sparse.from_dense(np.array([1, np.nan, -np.inf, 2, np.inf], dtype=dtype))
    kept, dropped = keep_largest(sparse, 2)
    assert kept.indices.tolist() == [1, 2]
    assert dropped.indices.tolist() == [0, 3, 4]


@given(sparses(), sparses())
def test_splitting_by_index(sparse: Sparse, other: Sparse) -> None:
    inside, outside = split_common(sparse, other)
    assert set(inside.indices) == set(sparse.indices) & set(other.indices)
    assert set(outside.indices) == set(sparse.indices) - set(other.indices)
    np.testing.assert_array_equal(add(inside, outside).to_dense(), sparse.to_dense())


@given(sparses(num_elements=1000), st.integers(1, 5))
def test_partition_and_union_are_inverse(sparse: Sparse, num_owners: int) -> None:
    parts = partition(sparse, num_owners)
    assert len(parts) == num_owners
    owners = owner_of(sparse.indices, num_owners)
    for owner, part in enumerate(parts):
        np.testing.assert_array_equal(part.indices, sparse.indices[owners == owner])
    union = union_disjoint(parts)
    np.testing.assert_array_equal(union.indices, sparse.indices)
    np.testing.assert_array_equal(union.values, sparse.values)


def test_a_union_of_overlapping_parts_is_refused() -> None:
    part = Sparse.from_dense(np.array([0.0, 1.0]))
    with pytest.raises(WireError, match="same index"):
        union_disjoint([part, part])


_FAULTS = """
import resource
import numpy as np
from offbeat.codec.sparse import Sparse, add, keep_largest

draw = np.random.default_rng(0)
pair = [
    Sparse(
        indices=np.sort(draw.choice(1 << 24, 25_000, replace=False)),
        values=draw.standard_normal(25_000).astype(np.float32),
        num_elements=1 << 24,
    )
    for _ in range(2)
]
keep_largest(add(*pair), 25_000)
begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    keep_largest(add(*pair), 25_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do otherwise")
def test_merges_fetch_no_memory_anew() -> None:
    """In an interpreter of its own: what ran before in this one has shaped the heap."""
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True
    )
    merged_bytes = 20 * 4 * 25_000 * (8 + 4)  # a sum and its two parts, each of up to 2 * 25,000
    assert int(done.stdout) < merged_bytes / 4096 / 10


_MAPPED = """
import ctypes

import torch

import offbeat


class Told(ctypes.Structure):
    _fields_ = [(f"number_{position}", ctypes.c_size_t) for position in range(10)]


def num_mapped():
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Told
    return mallinfo2().number_3


model = torch.nn.Linear(1, 1)
with offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce"):
    before = num_mapped()
    large = torch.empty(100 << 20, dtype=torch.uint8)
    print(num_mapped() - before)
"""


@pytest.mark.skipif(
    getattr(ctypes.CDLL(None), "mallinfo2", None) is None, reason="glibc 2.33 and newer tell"
)
@pytest.mark.parametrize(
    ("environment", "num_mapped"),
    [({}, 0), ({"MALLOC_PERTURB_": "0"}, 1), ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, 1)],
    ids=["kept", "variable", "tunable"],
)
def test_attaching_lets_large_blocks_be_kept_unless_the_environment_says_something_of_malloc(
    environment: dict[str, str], num_mapped: int
) -> None:
    """A block that glibc maps by itself is unmapped when it is freed."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _MAPPED],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == num_mapped


SETS = st.sets(st.integers(0, 200), max_size=100)


@given(SETS, SETS, st.sampled_from([1.0, -1.0]))
def test_long_lists_are_added(a: set[int], b: set[int], sign: float) -> None:
    """Long enough for both halves of the merge to end at different times; with the sign -1 common
    entries cancel.
    """
    indices_a, indices_b = np.array(sorted(a), dtype=np.int64), np.array(sorted(b), dtype=np.int64)
    total = add(
        Sparse(indices=indices_a, values=1.0 + indices_a, num_elements=201),
        Sparse(indices=indices_b, values=sign * (1.0 + indices_b), num_elements=201),
    )
    expected = np.array(sorted(a | b), dtype=np.int64)
    np.testing.assert_array_equal(total.indices, expected)
    times = np.isin(expected, indices_a) + sign * np.isin(expected, indices_b)
    np.testing.assert_array_equal(total.values, times * (1.0 + expected))


def test_warming_up_compiles_all_that_is_used() -> None:
    jit.warm()
    before = [len(kernel.signatures) for kernel in COMPILED]  # type: ignore[attr-defined]
    tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))
    codecs: dict[type[np.floating], list[ValueCodec]] = {
        np.float32: [Float32Values(), BFloat16Values(), Float8Values()],
        np.float64: [Float32Values(), Float64Values()],
    }
    for dtype, value_codecs in codecs.items():
        sparse = Sparse(
            indices=np.arange(0, 900, 3),
            values=np.linspace(-1, 2, 300).astype(dtype),
            num_elements=1000,
        )
        mine, others = partition(sparse, 2)
        for values in value_codecs:
            wire = Wire(num_elements=1000, num_parameters=1, dtype=np.dtype(dtype), values=values)
            payload, rounding = wire.encode(mine, tally)
            theirs, _ = wire.decode(payload)
            kept, _ = keep_largest(add(add(theirs, others), rounding), 100)
            split_common(kept, mine)
            quotas([histogram(kept, 50, 2), histogram(theirs, 50, 2)], 50)
    assert [len(kernel.signatures) for kernel in COMPILED] == before  # type: ignore[attr-defined]
