"""Is there an infinity or a NaN?"""

from __future__ import annotations

import torch


def is_finite(flat: torch.Tensor) -> bool:
    """Whether every element is finite, at the price of a sum.

    An infinity or NaN anywhere makes the sum non-finite; only a sum that overflows needs a second,
    slower look.
    """
    wide = torch.promote_types(flat.dtype, torch.float32)
    return bool(torch.isfinite(flat.sum(dtype=wide))) or bool(torch.isfinite(flat).all())
