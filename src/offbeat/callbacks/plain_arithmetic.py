"""Arithmetic outside of what surrounds a script's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def plain_arithmetic(device_type: str) -> Iterator[None]:
    """Inside, operations are computed without gradients and in the precision of their operands.

    Hooks run in the autocast region of the model, of `backward()` or of `optimizer.step()`, as a
    loop has placed it. There products of matrices would be in 16 bits.

    Args:
        device_type: of the operands.
    """
    casts = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    # Entering an autocast region takes longer than much that is computed in it.
    outside = torch.autocast(device_type, enabled=False) if casts else nullcontext()
    with torch.no_grad(), outside:
        yield
