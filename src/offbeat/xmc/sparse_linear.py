"""A linear layer for sparse rows. Its weight's gradient is sparse too: it has the rows of the
features that a batch has.

1. Forward: each row adds up its features' weights, read where they lie, which
   `torch.nn.functional.embedding_bag` does well.
2. Backward: list the batch's features, ascending, and sort its entries by feature.
3. Each listed feature adds up its rows' gradients. Every row of the gradient is written once.

Time and memory depend on the batch, not on the number of features, but for a counter for each. The
kernels of the backward pass serve float32 and float64 on the CPU; elsewhere torch's own operations
work on the listed rows, gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from offbeat.codec.jit import kernel
from offbeat.xmc.row_gradients import RowGradient, as_sparse, densely, take_rows
from offbeat.xmc.rows import SparseBatch


@kernel
def count_columns(
    columns: NDArray[np.int32], counts: NDArray[np.int32], found: NDArray[np.int64]
) -> int:
    """Count how often each column occurs, and list those that do, in no particular order. Returns
    how many there are.

    Args:
        columns: shape (entries,).
        counts: takes the counts; zeros before; shape (columns,).
        found: takes the list; as long as `columns`.
    """
    num_found = np.uint64(0)
    for i in range(columns.size):
        column = np.uint64(columns[i])
        found[num_found] = columns[i]
        num_found += np.uint64(counts[column] == 0)
        counts[column] += 1
    return int(num_found)


@kernel
def sort_by_column(
    offsets: NDArray[np.int64],
    columns: NDArray[np.int32],
    values: NDArray[np.floating],
    found: NDArray[np.int64],
    counts: NDArray[np.int32],
    ends: NDArray[np.int64],
    rows: NDArray[np.int32],
    sorted_values: NDArray[np.floating],
) -> None:
    """Sort entries by column, keeping their order otherwise.

    Args:
        offsets: of rows, shape (rows + 1,).
        columns: shape (entries,).
        values: shape (entries,).
        found: the columns that occur, ascending.
        counts: how often, shape (columns,); overwritten.
        ends: takes where each found column's entries end, shape (found,).
        rows: takes each entry's row, shape (entries,).
        sorted_values: takes its value, shape (entries,).
    """
    place = 0
    for i in range(found.size):
        begin = place
        place += counts[found[i]]
        ends[i] = place
        counts[found[i]] = begin
    for row in range(offsets.size - 1):
        for i in range(offsets[row], offsets[row + 1]):
            column = np.uint64(columns[i])
            at = np.uint64(counts[column])
            counts[column] += 1
            rows[at] = row
            sorted_values[at] = values[i]


@kernel
def multiply_transposed(
    ends: NDArray[np.int64],
    rows: NDArray[np.int32],
    values: NDArray[np.floating],
    gradient: NDArray[np.floating],
    product: NDArray[np.floating],
) -> None:
    """Entries sorted by column, transposed, times `gradient`.

    Args:
        ends: as of `sort_by_column`.
        rows: the same.
        values: the same.
        gradient: shape (rows, outputs).
        product: takes the result, shape (found, outputs).
    """
    begin = 0
    for i in range(ends.size):
        total = product[i]
        total[:] = 0
        for entry in range(begin, ends[i]):
            value, of_row = values[entry], gradient[np.uint64(rows[entry])]
            for j in range(total.size):
                total[j] += value * of_row[j]
        begin = ends[i]


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
        gradient = gradients[0].contiguous().numpy()
        counts = np.zeros(ctx.shape[0], dtype=np.int32)
        found = np.empty(columns.size + 1, dtype=np.int64)
        found = np.sort(found[: count_columns(columns, counts, found)])
        ends, rows = np.empty(found.size, dtype=np.int64), np.empty(columns.size, dtype=np.int32)
        sorted_values = np.empty_like(values)
        sort_by_column(offsets, columns, values, found, counts, ends, rows, sorted_values)
        product = np.empty((found.size, ctx.shape[1]), dtype=gradient.dtype)
        multiply_transposed(ends, rows, sorted_values, gradient, product)
        rows_found = RowGradient(torch.from_numpy(found), torch.from_numpy(product))
        return as_sparse(rows_found, ctx.shape), None, None, None
