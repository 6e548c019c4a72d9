"""Symmetric matrices: as sums of outer products, and packed as triangles.

`gram` sums outer products, X^T X, of which only the upper triangle is needed. In main memory BLAS
has an operation for it (`kfac.lapack`). Elsewhere, cut into four blocks of columns, the blocks on
and above its diagonal are ten of sixteen, so that much of the arithmetic of one large product is
enough.

`pack` and `unpack` keep d (d + 1) / 2 numbers of a matrix, the upper triangle row by row. Large
ones in main memory are copied by rows (`kfac.lapack`), which takes a fraction of the time of
gathering single numbers. For others flat indices are made once for each size and device and kept as
int32; making them anew takes ten times as long as using them. They are shared by all factors of one
size.
"""

from __future__ import annotations

from functools import cache

import torch

from offbeat.kfac.lapack import packed_triangles, sum_outer_products_, unpacked_triangles

NUM_CUTS = 4
MIN_BLOCK = 96
"""Narrower products than this run slower by more than what is saved."""

MIN_BY_ROWS = 64
"""Shorter rows than this are gathered."""


def gram(rows: torch.Tensor, *, ones: bool = False) -> torch.Tensor:
    """Sum over n of the outer products of `rows`.

    Args:
        rows: shape (groups, n, d), float32 or float64.
        ones: each row is followed by a 1, the input of a bias.

    Returns:
        Shape (groups, d, d), or (groups, d + 1, d + 1) with `ones`; only the upper triangles are
        meant to be read.
    """
    groups, num_rows, dim = rows.shape
    total = rows.new_zeros(groups, dim + ones, dim + ones)
    if rows.device.type == "cpu" and dim >= MIN_BLOCK and num_rows:
        squares = rows.new_zeros(groups, dim, dim) if ones else total
        sum_outer_products_(squares, rows)
        if ones:
            total[:, :dim, :dim] = squares
    else:
        block = max(-(-dim // NUM_CUTS), MIN_BLOCK)
        for start in range(0, dim, block):
            stop = min(start + block, dim)
            total[:, start:stop, start:dim] = rows[:, :, start:stop].mT @ rows[:, :, start:]
    if ones:
        total[:, :dim, dim] = rows.sum(dim=1)
        total[:, dim, dim] = num_rows
    return total


def num_packed(dim: int) -> int:
    """Elements of a packed triangle of a `dim` x `dim` matrix."""
    return dim * (dim + 1) // 2


def pack(matrices: torch.Tensor) -> torch.Tensor:
    """The upper triangles of `matrices`.

    Args:
        matrices: shape (groups, d, d), any dtype. What lies below the diagonal is not read.

    Returns:
        Shape (groups, d (d + 1) / 2), a copy.
    """
    groups, dim, _ = matrices.shape
    if _is_copied_by_rows(matrices, dim):
        return packed_triangles(matrices)
    return matrices.reshape(groups, dim * dim).index_select(1, _upper(dim, matrices.device))


def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The symmetric matrices, shape (groups, dim, dim), of `packed`, shape (groups, dim (dim + 1) /
    2).
    """
    if _is_copied_by_rows(packed, dim):
        return mirror_(unpacked_triangles(packed, dim))
    both: torch.Tensor = packed.index_select(1, _both(dim, packed.device))
    return both.view(-1, dim, dim)


def unpack_triangles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """As `unpack`, for those who read upper triangles only: what lies below means nothing."""
    if _is_copied_by_rows(packed, dim):
        return unpacked_triangles(packed, dim)
    return unpack(packed, dim)


def mirror_(matrices: torch.Tensor) -> torch.Tensor:
    """Overwrite what lies below the diagonals of `matrices`, shape (groups, d, d), by what lies
    above. Returns them.
    """
    matrices.triu_()
    for matrix in matrices:
        # Torch transposes one matrix block by block, and several number by number.
        lower = matrix.mT.clone(memory_format=torch.contiguous_format)
        lower.diagonal().zero_()
        matrix += lower
    return matrices


def _is_copied_by_rows(tensor: torch.Tensor, dim: int) -> bool:
    return (
        tensor.device.type == "cpu"
        and dim >= MIN_BY_ROWS
        and tensor.dtype in (torch.float32, torch.float64)
    )


def diagonal(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The diagonals, shape (groups, dim), of `packed`, shape (groups, dim (dim + 1) / 2)."""
    return packed.index_select(1, _diagonal(dim, packed.device))


def _flat_upper(dim: int) -> torch.Tensor:
    rows, columns = torch.triu_indices(dim, dim)
    return torch.add(columns, rows, alpha=dim)


@cache
def _upper(dim: int, device: torch.device) -> torch.Tensor:
    """Where the packed elements lie in the flattened square."""
    return _flat_upper(dim).to(device=device, dtype=torch.int32)


@cache
def _both(dim: int, device: torch.device) -> torch.Tensor:
    """Where the elements of the flattened square lie among the packed ones."""
    places = torch.zeros(dim * dim, dtype=torch.int32)
    places[_flat_upper(dim)] = torch.arange(num_packed(dim), dtype=torch.int32)
    square = places.view(dim, dim)
    return torch.maximum(square, square.mT).flatten().to(device)


@cache
def _diagonal(dim: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(dim, dtype=torch.int32, device=device)
    return dim * rows - torch.div(rows * (rows - 1), 2, rounding_mode="floor")
