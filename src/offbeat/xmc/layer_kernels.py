"""Kernels of the sparse input layer: which columns a batch has, and the gradients of
their weights.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel


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
