"""Sums of outer products, of which only the upper triangle is needed.

A product X^T X is symmetric. Cut into four blocks of columns, the blocks on and above its diagonal
are ten of sixteen, so that much of the arithmetic of one large product is enough.
"""

from __future__ import annotations

import torch

NUM_CUTS = 4
MIN_BLOCK = 96
"""Narrower products than this run slower by more than what is saved."""


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
    block = max(-(-dim // NUM_CUTS), MIN_BLOCK)
    for start in range(0, dim, block):
        stop = min(start + block, dim)
        total[:, start:stop, start:dim] = rows[:, :, start:stop].mT @ rows[:, :, start:]
    if ones:
        total[:, :dim, dim] = rows.sum(dim=1)
        total[:, dim, dim] = num_rows
    return total
