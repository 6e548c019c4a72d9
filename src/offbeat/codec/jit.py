"""How kernels are compiled, and numbers read as bits.

Magnitudes are ordered by their bits: for IEEE numbers without the sign bit, integer order is the
order of magnitude, infinities above all finite numbers and NaNs above those. So nothing is lost
even among values that are not numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

COMPILED: list[Callable[..., object]] = []
"""Every kernel, as numba's dispatcher."""


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled on first use for each combination of types; runs without the GIL.

    Kept in numba's cache on disk, which is pickle: docs/security.md says where it lies.
    """
    compiled = cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))
    COMPILED.append(compiled)
    return compiled


def bits_of(values: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """The same memory as unsigned integers of the same width, sign bit included."""
    return values.view(f"u{values.itemsize}")


@cache
def magnitude_mask(dtype: np.dtype[np.generic]) -> np.unsignedinteger:
    """All bits of a number of `dtype` but the sign, which is the topmost; as an unsigned integer of
    the same width.
    """
    unsigned = np.dtype(f"u{dtype.itemsize}")
    mask: np.unsignedinteger = unsigned.type((1 << 8 * dtype.itemsize - 1) - 1)
    return mask
