"""What tests ask of kept inverses."""

from __future__ import annotations

import torch


def has_inverse(inverse: torch.Tensor) -> torch.Tensor:
    """Whether what is kept of an inverse, shape (groups, n), is one and not zeros: a scalar tensor
    of bools.
    """
    return (inverse[:, 0] > 0).all()
