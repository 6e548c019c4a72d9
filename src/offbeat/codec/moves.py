"""Kernels that carry what a trainer did to a vector over to another one, in one pass over memory.

Vectors of models are larger than caches, so that each further pass costs as much as the first.
"""

from __future__ import annotations

import numpy as np

from offbeat.codec.jit import kernel
from offbeat.codec.model_wire import Values


@kernel
def move_by(mine: Values, new: Values, old: Values, out: Values) -> bool:
    """out = mine + (new - old), all shape (n,). Returns whether `new` is finite."""
    finite = True
    for i in range(mine.size):
        value = new[i]
        out[i] = mine[i] + (value - old[i])
        finite &= np.isfinite(value)
    return finite


@kernel
def copy_to(new: Values, out: Values) -> bool:
    """out = new, both shape (n,). Returns whether that is finite."""
    finite = True
    for i in range(new.size):
        value = new[i]
        out[i] = value
        finite &= np.isfinite(value)
    return finite


def warm() -> None:
    """Compile the kernels, or load them from numba's cache on disk."""
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        values: Values = np.ones(1, dtype=dtype)
        move_by(values, values, values, values.copy())
        copy_to(values, values.copy())
