"""How kernels are compiled, and where the memory comes from that they fill."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

COMPILED: list[Callable[..., object]] = []
"""Every kernel, as numba's dispatcher."""

_KEPT_BYTES = 16 << 20


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled on first use for each combination of types; runs without the GIL.

    Kept in numba's cache on disk, which is pickle: docs/security.md says where it lies.
    """
    compiled = cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))
    COMPILED.append(compiled)
    return compiled


@cache
def keep_freed_memory() -> None:
    """Let the allocator keep what is freed, up to twice `_KEPT_BYTES`.

    glibc gives freed memory at the end of the heap back to the system at once, and fetches it anew
    with a fault for each 4 KiB: this took as long as merging sparse vectors itself, and as adding
    up models. It stops when one larger block has been freed (mallopt(3), M_MMAP_THRESHOLD); the
    block below is never touched, so it costs nothing. Other allocators are not affected.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)


def is_compiled() -> bool:
    """Whether numba's cache on disk holds what `warm` would compile."""
    from offbeat.codec import selectors

    # One stands for all. numba names files after the line of the function.
    kept: Any = selectors.accumulate_and_collect
    line = kept.py_func.__code__.co_firstlineno
    return any(Path(kept.stats.cache_path).glob(f"selectors.{kept.__name__}-{line}.*.nbi"))


def warm() -> None:
    """Compile the kernels of selection, sparse vectors and their messages for float32 and float64,
    or load them from numba's cache on disk: by using each of them once. Takes some 10 s the first
    time.
    """
    import torch

    from offbeat.codec import histogram, selectors, sparse
    from offbeat.codec.index_codecs import GapIndices
    from offbeat.codec.tally import Tally
    from offbeat.codec.topk_codec import VALUE_CODECS
    from offbeat.codec.wire import Wire

    one = np.ones(1, dtype=np.int64)
    layout, coded = GapIndices().encode(700 * np.arange(64), 100_000)  # as Rice codes
    GapIndices().decode(layout, coded.view(np.uint8), 64, 100_000)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        # Of equal elements there are too many for every guess, so all ways of selecting are gone.
        flat = torch.from_numpy(np.ones(8 * selectors.SMALL, dtype=dtype))
        selectors.exact(flat.clone(), flat, k=1, weight=1.0)
        selectors.reuse(flat.clone(), flat, k=1, weight=1.0, threshold=1.0)
        entries = sparse.Sparse(indices=one, values=one.astype(dtype), num_elements=100_000)
        for values in VALUE_CODECS.values():
            wire = Wire(num_elements=100_000, num_parameters=0, dtype=dtype, values=values)
            wire.decode(wire.encode(entries, Tally.of_nobody(0))[0])
        total = sparse.add(entries, entries)
        sparse.keep_largest(total, 1)
        sparse.split_by_index(total, one)
        histogram.histogram(total, 1, 1)
