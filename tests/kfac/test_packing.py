from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac.factors import diagonal, num_packed, pack, unpack


@given(dim=st.integers(1, 90), groups=st.integers(1, 3))
def test_triangles_come_back_as_symmetric_matrices(dim: int, groups: int) -> None:
    matrices = torch.randn(groups, dim, dim, generator=torch.Generator().manual_seed(dim))
    packed = pack(matrices)
    assert packed.shape == (groups, num_packed(dim))
    expected = np.stack([matrix[np.triu_indices(dim)] for matrix in matrices.numpy()])
    np.testing.assert_array_equal(packed.numpy(), expected)
    upper = matrices.triu()
    assert torch.equal(
        unpack(packed, dim), upper + upper.mT - torch.diag_embed(matrices.diagonal(dim1=1, dim2=2))
    )
    assert torch.equal(diagonal(packed, dim), matrices.diagonal(dim1=1, dim2=2))
    assert torch.equal(pack(unpack(packed, dim)), packed)
