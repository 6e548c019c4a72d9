"""How kernels are compiled, and where the memory comes from that they fill."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

COMPILED: list[Callable[..., object]] = []
"""Every kernel, as numba's dispatcher."""

_KEPT_BYTES: Final = 16 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled on first use for each combination of types; runs without the GIL.

    Kept in numba's cache on disk, which is pickle: docs/security.md says where it lies.
    """
    compiled = cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))
    COMPILED.append(compiled)
    return compiled


@cache
def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step, unless the environment says something of
    malloc. Other allocators are not affected.

    By default memory at the end of the heap, and each block of more than 32 MB, goes back to the
    system at once, and is fetched anew with a fault for each 4 KiB: this took as long as merging
    sparse vectors itself, and a fifth of a step of a large model
    (`benchmarks/studies/kept_memory.py`).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Without the first the second would be harmful: every block of more than 128 KiB is mapped.
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _NEVER):
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
    else:
        # Older releases refuse, and learn from a block that is freed to keep smaller ones. It is
        # never touched, so it costs nothing.
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
        sparse.split_common(total, entries)
        histogram.histogram(total, 1, 1)
