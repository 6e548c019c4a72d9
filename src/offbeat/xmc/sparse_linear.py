"""A linear layer for sparse rows. Its weight's gradient is sparse too: it has the rows of the
features that a batch has.

1. Forward: each row adds up its features' weights, read where they lie, which
   `torch.nn.functional.embedding_bag` does well.
2. Backward: list the features that the batch has, ascending.
3. Each listed feature adds up its rows' gradients. Every row of the gradient is written once.

Time and memory depend on the batch, not on the number of features, but for a number for each. The
backward pass in SciPy serves float32 and float64 on the CPU, in a sixth of the time that torch's
own operations take there; these serve elsewhere, on the listed rows, gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional

from offbeat.xmc.row_gradients import RowGradient, as_sparse, densely, take_rows
from offbeat.xmc.rows import SparseBatch


class SparseLinear(nn.Module):
    """A linear layer whose input is sparse rows.

    Args:
        num_features: columns of the input.
        num_outputs: columns of the output.
        bias: whether to add one.

    Attributes:
        weight: shape (num_features, num_outputs), so that a feature's weights lie together. Drawn
            from a normal distribution of deviation 1 / sqrt(num_outputs): outputs of a row of
            length 1 then have length 1 or so, for any number of features.
        bias: shape (num_outputs,), zeros at first; or None.
        dense_gradients: whether the weight's gradient is to be dense all the same, for those that
            know no other.
    """

    def __init__(self, num_features: int, num_outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_features, num_outputs).mul_(num_outputs**-0.5))
        self.bias = nn.Parameter(torch.zeros(num_outputs)) if bias else None
        self.dense_gradients = False

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        """Sparse rows times weight, plus bias: shape (rows, num_outputs).

        Raises:
            ConfigError: a column is out of range.
        """
        product = sparse_matmul(
            batch, densely(self.weight) if self.dense_gradients else self.weight
        )
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, bias={self.bias is not None}"


def sparse_matmul(batch: SparseBatch, weight: torch.Tensor) -> torch.Tensor:
    """Sparse rows times `weight`, shape (columns, outputs). The gradient of `weight` is sparse, see
    `row_gradients`.

    Raises:
        ConfigError: a column is out of range.
    """
    batch.require_columns(weight.shape[0], "columns")
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64):
        # torch leaves it so
        product: torch.Tensor = _Product.apply(weight, *batch)  # type: ignore[no-untyped-call]
        return product
    return portable_matmul(batch, weight)


def portable_matmul(batch: SparseBatch, weight: torch.Tensor) -> torch.Tensor:
    """What `sparse_matmul` computes, by torch's own operations, on any device and for any type of
    number.
    """
    found, position = torch.unique(batch.columns, return_inverse=True)
    return _weighted_sums(position, take_rows(weight, found.long()), batch.offsets, batch.values)


def _weighted_sums(
    columns: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return functional.embedding_bag(
        columns,
        weight,
        offsets.to(columns.dtype),
        per_sample_weights=values.to(weight.dtype),
        mode="sum",
        include_last_offset=True,
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        columns: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(offsets, columns, values)
        ctx.shape = weight.shape
        return _weighted_sums(columns, weight, offsets, values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        offsets, columns, values = (tensor.numpy() for tensor in ctx.saved_tensors)
        occurs = np.zeros(ctx.shape[0], dtype=np.bool_)
        occurs[columns] = True
        found = np.flatnonzero(occurs)
        place = np.empty(ctx.shape[0], dtype=np.int32)
        place[found] = np.arange(found.size, dtype=np.int32)
        shape = offsets.size - 1, found.size
        rows = sparse.csr_array((values, place[columns], offsets), shape=shape)
        product = rows.T @ gradients[0].numpy()
        rows_found = RowGradient(torch.from_numpy(found), torch.from_numpy(product))
        return as_sparse(rows_found, ctx.shape), None, None, None
