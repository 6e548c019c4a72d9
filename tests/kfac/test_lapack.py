"""Decompositions and inverses in place, against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from offbeat.kfac.factors import cholesky_, sum_outer_products_


def positive(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(
        num, 2 * dim, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
    )
    return (rows.mT @ rows / dim + 0.1 * torch.eye(dim)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num", "dim"), [(1, 1), (3, 2), (2, 33)])
def test_upper_triangles_are_those_of_u_or_of_inverses(
    num: int, dim: int, dtype: torch.dtype
) -> None:
    matrices = positive(num, dim, dtype)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-10
    triangles, inverses = matrices.clone(), matrices.clone()
    assert cholesky_(triangles, inverts=False).tolist() == [True] * num
    assert cholesky_(inverses, inverts=True).tolist() == [True] * num
    for matrix, triangle, inverse in zip(matrices, triangles, inverses, strict=True):
        upper = np.triu(triangle.numpy())
        np.testing.assert_allclose(upper.T @ upper, matrix.numpy(), atol=tolerance)
        np.testing.assert_allclose(
            np.triu(inverse.numpy()), np.triu(np.linalg.inv(matrix.numpy())), atol=tolerance
        )


@pytest.mark.parametrize("inverts", [False, True])
def test_one_that_is_not_positive_definite_does_not_hurt_the_others(inverts: bool) -> None:
    matrices = positive(3, 5, torch.float32)
    alone = matrices[2:].clone()
    matrices[1, 3, 3] = -1.0
    assert cholesky_(matrices, inverts=inverts).tolist() == [True, False, True]
    assert cholesky_(alone, inverts=inverts).tolist() == [True]
    assert torch.equal(matrices[2].triu(), alone[0].triu())


@pytest.mark.parametrize("layout", ["by rows", "by columns", "every second row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_outer_products_are_those_of_any_layout(dtype: torch.dtype, layout: str) -> None:
    whole = torch.randint(-3, 4, (2, 14, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = {
        "by rows": whole,
        "by columns": whole.mT.contiguous().mT,
        "every second row": whole[:, ::2],
    }[layout]
    squares = torch.full((2, 5, 5), 7.0, dtype=dtype)
    sum_outer_products_(squares, rows)
    assert torch.equal(squares.triu(), (rows.mT @ rows).triu())
    assert (squares.tril(-1) == torch.full((5, 5), 7.0, dtype=dtype).tril(-1)).all()


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = [pool["num_threads"] for pool in threadpool_info()]
    cholesky_(positive(1, 4, torch.float32), inverts=True)
    assert [pool["num_threads"] for pool in threadpool_info()] == before
