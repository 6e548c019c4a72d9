"""Sparse rows: what the readers give, what is dealt out to workers, and what a sparse layer takes.

Rows lie one behind the other (CSR). Labels are rows too, whose values say how much each label
counts, usually 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import ConfigError

MOST_COLUMNS = 2**31 - 1


class SparseBatch(NamedTuple):
    """Sparse rows as tensors.

    Attributes:
        offsets: int64, shape (rows + 1,): row r is entries offsets[r] to offsets[r + 1].
        columns: int32, shape (entries,). A column may occur twice in a row; its values then add up.
        values: float32, shape (entries,).
    """

    offsets: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.offsets.numel() - 1

    def require_columns(self, num_columns: int, kind: str) -> None:
        """Raise `ConfigError` unless all columns are below `num_columns`. `kind` names them."""
        if self.columns.numel():
            low, high = (int(bound) for bound in self.columns.aminmax())
            if low < 0 or high >= num_columns:
                raise ConfigError(
                    f"{kind} run from {low} to {high}; there are {num_columns} of them: was the"
                    " model made for these data?"
                )

    def row_of_entry(self) -> torch.Tensor:
        """int64, shape (entries,)."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return rows.repeat_interleave(self.offsets.diff(), output_size=self.columns.numel())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SparseBatch:
        return SparseBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseRows:
    """Rows that are zero nearly everywhere.

    Attributes:
        offsets: int64, shape (rows + 1,), from 0 on, never descending.
        columns: int32, shape (entries,), in [0, num_columns).
        values: float32, shape (entries,), finite.
        num_columns: in [0, 2**31).
    """

    offsets: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    num_columns: int

    def __len__(self) -> int:
        return self.offsets.size - 1

    @classmethod
    def from_entries(
        cls, rows: Iterable[Iterable[tuple[int, float]]], *, num_columns: int
    ) -> SparseRows:
        """Rows of (column, value) pairs, for small data.

        >>> SparseRows.from_entries([[(3, 1.0)], []], num_columns=5).offsets
        array([0, 1, 1])

        Raises:
            ConfigError: a column is out of range.
        """
        listed = [list(row) for row in rows]
        entries = [entry for row in listed for entry in row]
        columns = np.array([column for column, _ in entries], dtype=np.int64)
        if columns.size and not 0 <= columns.min() <= columns.max() < num_columns:
            raise ConfigError(
                f"columns run from {columns.min()} to {columns.max()}; allowed are 0 to"
                f" {num_columns - 1}"
            )
        return cls(
            offsets=offsets_of([len(row) for row in listed]),
            columns=columns.astype(np.int32),
            values=np.array([value for _, value in entries], dtype=np.float32),
            num_columns=num_columns,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """At least one part, one behind the other; all of the same number of columns."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            offsets=offsets_of(np.concatenate([part.lengths() for part in parts])),
            columns=np.concatenate([part.columns for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            num_columns=parts[0].num_columns,
        )

    def lengths(self) -> NDArray[np.int64]:
        """Entries of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def part(self, begin: int, end: int) -> SparseRows:
        """Rows `begin` to `end`, without copying entries."""
        offsets = self.offsets[begin : end + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        columns, values = self.columns[first:last], self.values[first:last]
        return replace(self, offsets=offsets - first, columns=columns, values=values)

    def take(self, rows: NDArray[np.int64]) -> SparseRows:
        """The rows of these numbers, in this order."""
        begins = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begins
        offsets = offsets_of(lengths)
        entries = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
        columns, values = self.columns[entries], self.values[entries]
        return replace(self, offsets=offsets, columns=columns, values=values)

    def normalised(self) -> SparseRows:
        """The rows at Euclidean length 1; empty rows and rows of zeros as they are."""
        row_of_entry = np.repeat(np.arange(len(self)), self.lengths())
        squares = np.bincount(
            row_of_entry, weights=np.square(self.values, dtype=np.float64), minlength=len(self)
        )
        scale = 1 / np.sqrt(np.where(squares > 0, squares, 1.0))
        return replace(self, values=(self.values * scale[row_of_entry]).astype(np.float32))

    def counts(self) -> NDArray[np.int64]:
        """In how many entries each column occurs, shape (num_columns,)."""
        return np.bincount(self.columns, minlength=self.num_columns)

    def to_batch(self) -> SparseBatch:
        """The same memory as tensors."""
        return SparseBatch(
            torch.from_numpy(self.offsets),
            torch.from_numpy(self.columns),
            torch.from_numpy(self.values),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Examples:
    """Samples of multi-label classification: two `SparseRows` of the same length."""

    features: SparseRows
    labels: SparseRows

    def __len__(self) -> int:
        return len(self.features)

    @classmethod
    def concatenate(cls, parts: Sequence[Examples]) -> Examples:
        """At least one part, one behind the other."""
        return cls(
            features=SparseRows.concatenate([part.features for part in parts]),
            labels=SparseRows.concatenate([part.labels for part in parts]),
        )

    def part(self, begin: int, end: int) -> Examples:
        """Samples `begin` to `end`, without copying entries."""
        return Examples(
            features=self.features.part(begin, end), labels=self.labels.part(begin, end)
        )

    def take(self, samples: NDArray[np.int64]) -> Examples:
        """The samples of these numbers, in this order."""
        return Examples(features=self.features.take(samples), labels=self.labels.take(samples))

    def batches(self, batch_size: int) -> Iterator[Examples]:
        """All samples in order, `batch_size` at a time; the last batch may be smaller."""
        for begin in range(0, len(self), batch_size):
            yield self.part(begin, min(begin + batch_size, len(self)))


def regroup(pieces: Iterable[Examples], num_rows: int) -> Iterator[Examples]:
    """The same samples, exactly `num_rows` at a time but for the last ones."""
    waiting: list[Examples] = []
    num_waiting = 0
    for piece in pieces:
        begin = 0
        while len(piece) - begin >= num_rows - num_waiting:
            end = begin + num_rows - num_waiting
            yield Examples.concatenate([*waiting, piece.part(begin, end)])
            waiting, num_waiting, begin = [], 0, end
        if begin < len(piece):
            waiting.append(piece.part(begin, len(piece)))
            num_waiting += len(piece) - begin
    if waiting:
        yield Examples.concatenate(waiting)


def offsets_of(lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Of rows with so many entries each."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
