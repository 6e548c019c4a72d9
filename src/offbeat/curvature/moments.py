"""Sums of outer products, of which only the upper triangle is needed.

A product X^T X is symmetric. Cut into four blocks of columns, the blocks on and above its diagonal are ten of sixteen, so
that much of the arithmetic of one large product is enough.
"""

from __future__ import annotations

import torch

NUM_CUTS = 4
MIN_BLOCK = 96
"""Narrower products than this run slower by more than what is saved."""


def add_gram_(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows^T rows to the upper triangle of `total`; below the diagonal stands anything.

    Args:
        total: shape (d, d), or a view of that shape with unit stride along its last dimension.
        rows: shape (n, d), of the same dtype, any strides.
    """
    dim = rows.shape[1]
    block = max(-(-dim // NUM_CUTS), MIN_BLOCK)
    for start in range(0, dim, block):
        stop = min(start + block, dim)
        total[start:stop, start:].addmm_(rows[:, start:stop].mT, rows[:, start:])


def gram(rows: torch.Tensor, *, ones: bool = False) -> torch.Tensor:
    """Sum over n of the outer products of `rows`.

    Args:
        rows: shape (groups, n, d), float32 or float64.
        ones: each row is followed by a 1, the input of a bias.

    Returns:
        Shape (groups, d, d), or (groups, d + 1, d + 1) with `ones`; only the upper triangles are meant to be read.
    """
    groups, num_rows, dim = rows.shape
    total = rows.new_zeros(groups, dim + ones, dim + ones)
    if groups == 1:
        add_gram_(total[0, :dim, :dim], rows[0])
    else:
        torch.bmm(rows.mT, rows, out=total) if not ones else total[:, :dim, :dim].baddbmm_(rows.mT, rows)
    if ones:
        total[:, :dim, dim] = rows.sum(dim=1)
        total[:, dim, dim] = num_rows
    return total
