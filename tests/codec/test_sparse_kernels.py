"""Kernels that merge two stretches side by side, and what `warm` promises."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec import jit
from offbeat.codec.histogram import histogram, quotas
from offbeat.codec.jit import COMPILED
from offbeat.codec.sparse import Sparse, add, keep_largest, partition, split_by_index
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import (
    BFloat16Values,
    Float8Values,
    Float32Values,
    Float64Values,
    ValueCodec,
)
from offbeat.codec.wire import Wire

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
            split_by_index(kept, mine.indices)
            quotas([histogram(kept, 50, 2), histogram(theirs, 50, 2)], 50)
    assert [len(kernel.signatures) for kernel in COMPILED] == before  # type: ignore[attr-defined]
