"""The sparse input layer against dense multiplication, on the kernels and on the way that serves
accelerators.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.xmc.row_gradients import read_sparse, take_rows
from offbeat.xmc.rows import SparseBatch, SparseRows
from offbeat.xmc.sparse_linear import SparseLinear, portable_matmul, sparse_matmul

NUM_FEATURES, NUM_OUTPUTS = 30, 5
Matmul = Callable[[SparseBatch, torch.Tensor], torch.Tensor]

entries = st.tuples(st.integers(0, NUM_FEATURES - 1), st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
many_rows = st.lists(st.lists(entries, max_size=6), min_size=1, max_size=8)
both_ways = pytest.mark.parametrize("matmul", [sparse_matmul, portable_matmul])


def make_batch(listed: list[list[tuple[int, float]]]) -> SparseBatch:
    return SparseRows.from_entries(listed, num_columns=NUM_FEATURES).to_batch()


def as_dense(batch: SparseBatch, dtype: torch.dtype) -> torch.Tensor:
    table = torch.zeros(batch.num_rows, NUM_FEATURES, dtype=dtype)
    return table.index_put_(
        (batch.row_of_entry(), batch.columns.long()), batch.values.to(dtype), accumulate=True
    )


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(listed=many_rows)
def test_product_and_gradient_are_those_of_dense_rows(
    matmul: Matmul, dtype: torch.dtype, listed: list[list[tuple[int, float]]]
) -> None:
    batch = make_batch(listed)
    weight = (
        torch.linspace(-1, 1, NUM_FEATURES * NUM_OUTPUTS, dtype=dtype)
        .view(NUM_FEATURES, NUM_OUTPUTS)
        .requires_grad_()
    )
    product = matmul(batch, weight)
    expected = as_dense(batch, dtype) @ weight
    assert product.dtype == dtype
    torch.testing.assert_close(product, expected)
    upstream = torch.cos(torch.arange(product.numel(), dtype=dtype)).view_as(product)
    (found,) = torch.autograd.grad(product, weight, upstream)
    (wanted,) = torch.autograd.grad(expected, weight, upstream)
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), wanted)


@both_ways
@given(listed=many_rows)
def test_the_gradient_has_the_rows_of_the_batch_and_no_others(
    matmul: Matmul, listed: list[list[tuple[int, float]]]
) -> None:
    batch = make_batch(listed)
    weight = torch.ones(NUM_FEATURES, NUM_OUTPUTS, requires_grad=True)
    matmul(batch, weight).sum().backward()
    assert weight.grad is not None
    assert read_sparse(weight.grad).rows.tolist() == np.unique(batch.columns.numpy()).tolist()


def test_gradients_of_several_passes_add_up() -> None:
    layer = SparseLinear(NUM_FEATURES, NUM_OUTPUTS)
    first, second = make_batch([[(1, 1.0)]]), make_batch([[(1, 2.0), (4, 1.0)]])
    (layer(first).sum() + layer(second).sum()).backward()
    layer(second).sum().backward()
    assert layer.weight.grad is not None
    sums = read_sparse(layer.weight.grad)
    assert sums.rows.tolist() == [1, 4]
    assert sums.values[:, 0].tolist() == [5.0, 2.0]


@both_ways
def test_the_same_batch_gives_the_same_bits(matmul: Matmul) -> None:
    rng = np.random.default_rng(0)
    batch = make_batch(
        [
            [(int(c), float(rng.random())) for c in rng.integers(NUM_FEATURES, size=20)]
            for _ in range(50)
        ]
    )
    weight = torch.randn(
        NUM_FEATURES, NUM_OUTPUTS, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    gradients = [
        torch.autograd.grad(matmul(batch, weight).square().sum(), weight)[0].to_dense()
        for _ in range(3)
    ]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_an_upstream_gradient_may_be_of_any_layout() -> None:
    batch = make_batch([[(1, 1.0)], [(2, 3.0)]])
    weight = torch.ones(NUM_FEATURES, NUM_OUTPUTS, requires_grad=True)
    sparse_matmul(batch, weight).sum().backward()  # an expanded scalar
    sparse_matmul(batch, weight).t().contiguous().square().sum().backward()  # a transposed one
    assert weight.grad is not None
    assert weight.grad.to_dense()[1:3].tolist() == [
        [1.0 + 2.0] * NUM_OUTPUTS,
        [3.0 + 18.0] * NUM_OUTPUTS,
    ]


def test_half_precision_goes_the_portable_way() -> None:
    weight = torch.ones(NUM_FEATURES, NUM_OUTPUTS, dtype=torch.bfloat16, requires_grad=True)
    product = sparse_matmul(make_batch([[(1, 1.0), (2, 3.0)], []]), weight)
    assert product.dtype == torch.bfloat16
    assert product.tolist() == [[4.0] * NUM_OUTPUTS, [0.0] * NUM_OUTPUTS]


def test_rows_of_a_vector_have_a_sparse_gradient_too() -> None:
    vector = torch.arange(6.0, requires_grad=True)
    take_rows(vector, torch.tensor([1, 4])).square().sum().backward()
    assert vector.grad is not None
    assert vector.grad.is_sparse
    assert vector.grad.to_dense().tolist() == [0, 2, 0, 0, 8, 0]


def test_a_gradient_is_dense_where_that_is_asked_for() -> None:
    batch = make_batch([[(1, 1.0)], [(2, 3.0), (1, 0.5)]])
    sparse, dense = SparseLinear(NUM_FEATURES, NUM_OUTPUTS), SparseLinear(NUM_FEATURES, NUM_OUTPUTS)
    dense.load_state_dict(sparse.state_dict())
    dense.dense_gradients = True
    for layer in (sparse, dense):
        layer(batch).square().sum().backward()
    assert sparse.weight.grad is not None
    assert dense.weight.grad is not None
    assert not dense.weight.grad.is_sparse
    assert torch.equal(dense.weight.grad, sparse.weight.grad.to_dense())


@pytest.mark.parametrize("column", [-1, NUM_FEATURES])
def test_columns_out_of_range_are_refused(column: int) -> None:
    batch = SparseBatch(
        torch.tensor([0, 1]), torch.tensor([column], dtype=torch.int32), torch.ones(1)
    )
    with pytest.raises(ConfigError, match="there are 30 of them: was the model made"):
        SparseLinear(NUM_FEATURES, NUM_OUTPUTS)(batch)


def test_a_batch_without_entries_gives_the_bias() -> None:
    layer = SparseLinear(NUM_FEATURES, NUM_OUTPUTS)
    layer(make_batch([[], []])).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert read_sparse(layer.weight.grad).rows.tolist() == []
    assert layer.bias.grad.tolist() == [2.0] * NUM_OUTPUTS
    assert SparseLinear(3, 2, bias=False).bias is None
    assert repr(layer) == "SparseLinear(30, 5, bias=True)"
